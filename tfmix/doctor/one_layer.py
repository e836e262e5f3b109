"""One call of a layer, in 16 bit and in float32 on the same input."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
from keras import ops

from tfmix import _formats
from tfmix._keras import layers
from tfmix.conversion import planned_policies
from tfmix.doctor import gaps, probe, pullback, whole_model


@dataclasses.dataclass(frozen=True)
class CallGaps:
    """The gaps one call opens by itself, in the order it opens them."""

    arguments: gaps.Gap  # of the inputs, by the cast to 16 bit alone
    outputs: gaps.Gap
    # Of the outputs' gradients, by the cast alone, and of those it computes.
    incoming: gaps.Gap | None = None
    inputs: gaps.Gap | None = None
    weights: gaps.Gap | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Judge:
    """Runs single calls both ways; `truth` is None without a loss."""

    sixteen: planned_policies.Plan
    run: whole_model.SixteenBitRun
    truth: whole_model.Truth | None
    limits: _formats.Format
    scale: float

    def call(self, call: probe.Call) -> CallGaps:
        """Judges a call that is about to be made in the float32 run."""
        signature, limits = self.run.signatures[call.key], self.limits
        exact = [ops.cast(leaf, "float32") for leaf in call.tensors]
        near = [
            ops.cast(ops.cast(leaf, limits.name) if small else leaf, dtype)
            for leaf, small, dtype in zip(
                exact, signature.rounded, signature.arguments, strict=True
            )
        ]
        arguments = gaps.gap(near, exact, limits)
        weights, inputs = call.target.weights, len(exact)
        values = [variable.value for variable in weights]
        function = _function(call, inputs, weights)
        truth, truth_back = pullback.pullback(function, [*exact, *values])
        with self._in_sixteen_bit(call.target):
            found, found_back = pullback.pullback(function, [*near, *values])
        outputs = gaps.gap(found, truth, limits)
        gradients = (self.truth.outputs if self.truth else {}).get(call.key)
        if gradients is None:
            return CallGaps(arguments, outputs)
        # Losses a layer adds come after its outputs; no gradient for them.
        exact = [*gradients, *map(ops.zeros_like, truth[len(gradients) :])]
        near = [
            ops.cast(gradient * self.scale, leaf.dtype)
            for gradient, leaf in zip(exact, found, strict=True)
        ]
        right = truth_back(
            [ops.cast(a, b.dtype) for a, b in zip(exact, truth, strict=True)]
        )
        wrong = found_back(near)
        backward = (
            (near, exact),
            (wrong[:inputs], right[:inputs]),
            (wrong[inputs:], right[inputs:]),
        )
        measured = [gaps.gap(*pair, limits, self.scale) for pair in backward]
        return CallGaps(arguments, outputs, *measured)

    def exact(self, call: probe.Call, tensors: Sequence[Any]) -> list[Any]:
        """Makes a call in float32 with other tensors."""
        return _function(call, len(tensors), [])(list(tensors))

    def near(self, call: probe.Call, tensors: Sequence[Any]) -> list[Any]:
        """Makes a call in 16 bit with other tensors."""
        with self._in_sixteen_bit(call.target):
            return self.exact(call, tensors)

    @contextlib.contextmanager
    def _in_sixteen_bit(self, target: probe.Target) -> Iterator[None]:
        layer, autocast = target.operation, None
        if isinstance(layer, keras.Layer) and layer.autocast:
            autocast = planned_policies.dtype(self.sixteen, layer)
        with (
            layers.policies(target.planned(self.sixteen)),
            layers.autocast(autocast),
        ):
            yield


def _function(
    call: probe.Call, tensors: int, weights: Sequence[Any]
) -> Callable[[list[Any]], list[Any]]:
    """Makes a call a function of its tensors and its weights."""

    def function(inputs: list[Any]) -> list[Any]:
        with layers.trial() as scope:
            for variable, value in zip(weights, inputs[tensors:], strict=True):
                scope.state_mapping[id(variable)] = value
            before = len(scope.losses)
            outputs = call.proceed_with(inputs[:tensors])
            return [*probe.floats(outputs), *scope.losses[before:]]

    return function
