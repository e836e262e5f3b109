"""Runs a model, and each of its calls, in 16 bit and in float32."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from tfmix import _formats
from tfmix._keras import context, graphs, layers
from tfmix._keras import variables as keras_variables
from tfmix.autocast import layer_calls
from tfmix.conversion import planned_policies
from tfmix.tools.diagnostics import batch as batches
from tfmix.tools.diagnostics import (
    differentiation,
    plans,
    probe,
    programs,
    ranges,
)

Key = tuple[int, int]
# A list of tensors in 16 bit, and the same tensors in float32.
Pair = tuple[list[Any], list[Any]]


@dataclasses.dataclass(frozen=True)
class Signature:
    """The float tensors of one call in the 16-bit run."""

    arguments: tuple[str, ...]  # the dtypes of the inputs
    outputs: tuple[str, ...]  # the dtypes of the outputs
    shapes: tuple[tuple[int, ...], ...]  # the shapes of the outputs


@dataclasses.dataclass(frozen=True)
class SixteenBitRun:
    """The result of the 16-bit run."""

    signatures: dict[Key, Signature]
    output_dtypes: tuple[str, ...]
    # The plan has float32 for each layer that fell back to it.
    planned: plans.Plan
    fallbacks: list[str]  # the reasons of these layers


@dataclasses.dataclass(frozen=True)
class Truth:
    """The float32 gradients of each call's outputs and of the weights."""

    outputs: dict[Key, list[Any]]
    weights: list[Any]


@contextlib.contextmanager
def in_float32(model: keras.Model) -> Iterator[None]:
    """Makes a model compute in float32 inside a block."""
    reference = plans.reference(model)
    with graphs.policies(reference), keras_variables.autocast("float32"):
        yield


def sixteen_bit(
    batch: batches.Batch,
    targets: Sequence[probe.Target],
    planned: plans.Plan,
) -> SixteenBitRun:
    """Runs the model forward in 16 bit and records the dtypes."""
    signatures: dict[Key, Signature] = {}
    output_dtypes: tuple[str, ...] = ()

    def forward(weights: list[Any]) -> list[Any]:
        nonlocal output_dtypes
        trace = context.trace()

        def on_call(call: probe.Call) -> Any:
            outputs = call.proceed()
            leaves, inputs = probe.floats(outputs), call.tensors
            # Calls in the body of a compiled loop have no values to read.
            if all(context.is_made_in(trace, x) for x in leaves + inputs):
                signatures[call.key] = Signature(
                    arguments=tuple(map(probe.dtype, inputs)),
                    outputs=tuple(map(probe.dtype, leaves)),
                    shapes=tuple(tuple(leaf.shape) for leaf in leaves),
                )
            return outputs

        with probe.watched(targets, on_call):
            outputs = probe.floats(batch.outputs(weights))
        output_dtypes = tuple(map(probe.dtype, outputs))
        return outputs

    with graphs.policies(planned):
        programs.run(forward, batch.weights())
        ran = {layer: layers.own_policy(layer) for layer in planned}
        fallbacks = layer_calls.reasons(batch.model)
    return SixteenBitRun(signatures, output_dtypes, ran, fallbacks)


def truth(
    batch: batches.Batch,
    targets: Sequence[probe.Target],
    signatures: dict[Key, Signature],
) -> Truth:
    """Runs the model forward and backward in float32."""

    def losses(inputs: list[Any]) -> list[Any]:
        tokens, weights = _split(inputs, signatures)

        def on_call(call: probe.Call) -> Any:
            outputs = call.proceed()
            leaves, token = probe.floats(outputs), tokens.get(call.key, [])
            if len(token) != len(leaves):
                return outputs
            # A token is zero, and its gradient is that of the output.
            pairs = zip(leaves, token, strict=True)
            added = [leaf + ops.cast(zero, leaf.dtype) for leaf, zero in pairs]
            return probe.replaced(outputs, added)

        with probe.watched(targets, on_call):
            return [batch.loss_at(weights)]

    def gradients_at(weights: list[Any]) -> list[Any]:
        tokens = [
            ops.zeros(shape, "float32")
            for signature in signatures.values()
            for shape in signature.shapes
        ]
        (loss,), back = differentiation.pullback(losses, [*tokens, *weights])
        return back([ops.ones_like(loss)])

    with in_float32(batch.model):
        gradients = programs.run(gradients_at, batch.weights())
    return Truth(*_split(gradients, signatures))


def _split(
    tensors: Sequence[Any], signatures: dict[Key, Signature]
) -> tuple[dict[Key, list[Any]], list[Any]]:
    """Splits a list into tensors for each call, and the remaining ones."""
    rest = iter(tensors)
    by_call = {
        key: [next(rest) for _ in signature.shapes]
        for key, signature in signatures.items()
    }
    return by_call, list(rest)


@dataclasses.dataclass(frozen=True)
class CallGaps:
    """The differences between one call in 16 bit and in float32."""

    # A cast to 16 bit is the only cause of the gaps of arguments and of
    # incoming gradients.
    arguments: ranges.Gap
    outputs: ranges.Gap
    # The gradients that come in, and those of the inputs and the weights; empty
    # without a loss.
    gradients: tuple[ranges.Gap, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Judge:
    """Runs single calls in 16 bit and float32; `truth` is None without loss."""

    batch: batches.Batch
    targets: list[probe.Target]
    run: SixteenBitRun
    truth: Truth | None
    limits: _formats.Format
    # A model with a policy of tfmix returns float32 and scales its gradients
    # inside.
    has_policy: bool
    # The optimizer's loss scale, and what it multiplies gradients by for each
    # 1 of it.
    loss_scale: float = 1.0
    unit: float = 1.0

    @property
    def scale(self) -> float:
        """The factor of the gradients."""
        return self.loss_scale * self.unit

    def at(self, loss_scale: float) -> "Judge":
        """Returns a judge at another loss scale."""
        return dataclasses.replace(self, loss_scale=loss_scale)

    def gaps(self, call: probe.Call) -> CallGaps:
        """Makes a call of the float32 run in 16 bit and in float32."""
        values = [x.value for x in call.target.weights]
        gradients = (self.truth.outputs if self.truth else {}).get(call.key)

        def both(*tensors: Any) -> list[Pair]:
            return self._both_ways(call, *tensors)

        scale = np.float32(self.scale)
        pairs: list[Pair] = programs.run(
            both, call.tensors, values, gradients, scale
        )
        scales = [1.0, 1.0, *[self.scale] * (len(pairs) - 2)]
        arguments, outputs, *gradients = (
            ranges.gap(near, exact, self.limits, scale)
            for (near, exact), scale in zip(pairs, scales, strict=True)
        )
        return CallGaps(arguments, outputs, tuple(gradients))

    def _both_ways(
        self,
        call: probe.Call,
        tensors: list[Any],
        values: list[Any],
        gradients: list[Any] | None,
        scale: Any,
    ) -> list[Pair]:
        inputs = len(tensors)
        exact = [ops.cast(leaf, "float32") for leaf in tensors]
        near = [
            ops.cast(leaf, dtype)
            for leaf, dtype in zip(
                exact, self.run.signatures[call.key].arguments, strict=True
            )
        ]
        function = _function(call, inputs, call.target.weights)
        truth, truth_back = differentiation.pullback(
            function, [*exact, *values]
        )
        # The gradient of a 16-bit variable has 16 bits, too.
        kept = [
            ops.cast(value, self._stored(call.target, value.dtype))
            for value in values
        ]
        with self._in_sixteen_bit(call.target):
            outputs, outputs_back = differentiation.pullback(
                function, [*near, *kept]
            )
        forward = [(near, exact), (outputs, truth)]
        if gradients is None:
            return forward
        # Losses that a layer adds come after its outputs, and get no gradient.
        exact = [*gradients, *map(ops.zeros_like, truth[len(gradients) :])]
        near = [
            ops.cast(gradient * scale, leaf.dtype)
            for gradient, leaf in zip(exact, outputs, strict=True)
        ]
        right = truth_back(
            [ops.cast(a, b.dtype) for a, b in zip(exact, truth, strict=True)]
        )
        with self._in_sixteen_bit(call.target):
            # The gradient of a quantized layer reads the layer's dtype.
            wrong = outputs_back(near)
        return [
            *forward,
            (near, exact),
            (wrong[:inputs], right[:inputs]),
            (wrong[inputs:], right[inputs:]),
        ]

    def _stored(self, target: probe.Target, dtype: Any) -> Any:
        """Returns the dtype that weights have in the run that is judged."""
        policy = self.run.planned.get(target.operation)
        if policy is None:
            return dtype
        planned = planned_policies.entry(policy, target.operation)
        narrow = planned.variable_dtype in _formats.SIXTEEN_BIT
        return planned.variable_dtype if narrow else dtype

    @contextlib.contextmanager
    def _in_sixteen_bit(self, target: probe.Target) -> Iterator[None]:
        layer, autocast = target.operation, None
        if isinstance(layer, keras.Layer) and layer.autocast:
            autocast = plans.dtype(self.run.planned, layer)
        with (
            graphs.policies(target.planned(self.run.planned)),
            keras_variables.autocast(autocast),
        ):
            yield


def _function(
    call: probe.Call, tensors: int, weights: Sequence[Any]
) -> Callable[[list[Any]], list[Any]]:
    """Returns a call as a function of its tensors and its weights."""

    def function(inputs: list[Any]) -> list[Any]:
        with _trial() as scope:
            for variable, value in zip(weights, inputs[tensors:], strict=True):
                scope.state_mapping[id(variable)] = value
            before = len(scope.losses)
            outputs = call.try_with(inputs[:tensors])
            return [*probe.floats(outputs), *scope.losses[before:]]

    return function


@contextlib.contextmanager
def _trial() -> Iterator[Any]:
    """Yields the open `keras.StatelessScope`, and restores it afterwards."""
    scope: Any = context.open_scope()
    mapping, losses = dict(scope.state_mapping), list(scope.losses)
    try:
        yield scope
    finally:
        scope.state_mapping, scope.losses = mapping, losses
