"""One call of a layer, in 16 bit and in float32 on the same input."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
from keras import ops

from tfmix import _formats
from tfmix._keras import layers
from tfmix.conversion import trial_policies
from tfmix.doctor import gaps, probe, pullback, whole_model

Gaps = tuple[gaps.Gap, gaps.Gap]


@dataclasses.dataclass(frozen=True)
class CallGaps:
    """The gaps one call opens by itself, in the order it opens them."""

    # Of the inputs, by the cast to 16 bit alone, and of the outputs.
    arguments: gaps.Gap
    outputs: gaps.Gap
    # Of the outputs' gradients, by the cast alone, and of those it computes.
    incoming: gaps.Gap | None = None
    inputs: gaps.Gap | None = None
    weights: gaps.Gap | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Judge:
    """Runs single calls both ways; `truth` is None without a loss."""

    sixteen: trial_policies.Plan
    run: whole_model.SixteenBitRun
    truth: whole_model.Truth | None
    limits: _formats.Format
    scale: float

    def call(self, call: probe.Call) -> CallGaps:
        """Judges a call that is about to be made in the float32 run."""
        signature = self.run.signatures[call.key]
        exact = [ops.cast(leaf, "float32") for leaf in call.tensors]
        near = [
            ops.cast(ops.cast(leaf, self.limits.name) if small else leaf, dtype)
            for leaf, small, dtype in zip(
                exact, signature.rounded, signature.arguments, strict=True
            )
        ]
        arguments = gaps.gap(near, exact, self.limits)
        weights = _weights(call.target)
        values = [variable.value for variable in weights]
        function = _function(call, len(exact), weights)
        truth, truth_back = pullback.pullback(function, [*exact, *values])
        with self._in_sixteen_bit(call.target):
            found, found_back = pullback.pullback(function, [*near, *values])
        outputs = gaps.gap(found, truth, self.limits)
        if self.truth is None:
            return CallGaps(arguments, outputs)
        gradients = self.truth.outputs.get(call.key)
        if gradients is None:
            return CallGaps(arguments, outputs)
        cast, (inputs, of_weights) = self._back(
            gradients, truth, truth_back, found, found_back, len(exact)
        )
        return CallGaps(arguments, outputs, cast, inputs, of_weights)

    def exact(self, call: probe.Call, tensors: Sequence[Any]) -> list[Any]:
        """Makes a call in float32 with other tensors."""
        return _function(call, len(tensors), [])(list(tensors))

    def near(self, call: probe.Call, tensors: Sequence[Any]) -> list[Any]:
        """Makes a call in 16 bit with other tensors."""
        with self._in_sixteen_bit(call.target):
            return _function(call, len(tensors), [])(list(tensors))

    def _back(
        self,
        gradients: Sequence[Any],
        truth: Sequence[Any],
        truth_back: Callable[[list[Any]], list[Any]],
        found: Sequence[Any],
        found_back: Callable[[list[Any]], list[Any]],
        inputs: int,
    ) -> tuple[gaps.Gap, Gaps]:
        # Losses a layer adds come after its outputs; no gradient for them.
        exact = [*gradients, *map(ops.zeros_like, truth[len(gradients) :])]
        near = [
            ops.cast(gradient * self.scale, leaf.dtype)
            for gradient, leaf in zip(exact, found, strict=True)
        ]
        cast = gaps.gap(near, exact, self.limits, self.scale)
        right = truth_back(
            [ops.cast(a, b.dtype) for a, b in zip(exact, truth, strict=True)]
        )
        wrong = found_back(near)
        return cast, (
            gaps.gap(wrong[:inputs], right[:inputs], self.limits, self.scale),
            gaps.gap(wrong[inputs:], right[inputs:], self.limits, self.scale),
        )

    @contextlib.contextmanager
    def _in_sixteen_bit(self, target: probe.Target) -> Iterator[None]:
        planned = {
            layer: self.sixteen[layer]
            for layer in target.layers
            if layer in self.sixteen
        }
        with layers.policies(planned), layers.autocast(self._autocast(target)):
            yield

    def _autocast(self, target: probe.Target) -> str | None:
        layer = target.operation
        if not isinstance(layer, keras.Layer) or not layer.autocast:
            return None
        return trial_policies.dtype(self.sixteen, layer)


def _weights(target: probe.Target) -> list[Any]:
    found = {
        id(variable): variable
        for layer in target.layers
        for variable in layer.trainable_variables
    }
    return list(found.values())


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
