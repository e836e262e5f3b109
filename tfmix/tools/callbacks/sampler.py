"""Runs an instrumented training step, which measures without any update."""

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from tfmix import _formats
from tfmix._keras import graphs
from tfmix._keras import layers as host
from tfmix._keras import variables as keras_variables
from tfmix.conversion import planned_policies
from tfmix.loss_scaling import optimizer as scaling
from tfmix.tools.diagnostics import batch as batches
from tfmix.tools.diagnostics import (
    differentiation,
    float8_products,
    probe,
    programs,
    ranges,
)

# A row of the forward pass holds two more: the relative error, and whether
# float32 is not finite either.
_WIDTH = len(ranges.COLUMNS)
# Each layer has this many rows for the gradients of its calls, and as many for
# those of their inputs, because layers may be shared.
_CALLS_PER_LAYER = 4
# Rounding moves a value by up to half an epsilon, and by a fifth of an epsilon
# in the mean of squares. `unrounded` moves only half of the values, so it moves
# them by the root of two more.
_MEAN_ROUNDING = 0.2 * 2**0.5
# This factor turns neighbouring positions into angles that are far apart.
_SHUFFLE = 12.9898


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a layer, as recorded while the step is traced."""

    target: int  # the index of the layer
    dtype: str  # the dtype of its output
    # The rows of `Sample.inputs` with the gradients of its inputs; empty if
    # no weights come before the call.
    inputs: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Sample:
    """The numbers of one step, on the host."""

    # The calls are in the order in which they ended.
    calls: tuple[Call, ...]
    # These entries of `inputs` are the loss's gradients of the model's outputs.
    loss_inputs: tuple[int, ...]
    # Each has an entry for each call. `errors` holds the relative error, and
    # whether float32 is not finite either.
    outputs: list[ranges.Measures]
    errors: np.ndarray
    output_gradients: list[ranges.Measures]
    # There is an entry for each gradient that a call computes for an input. It
    # is only a part of the tensor's gradient if other calls read the tensor.
    inputs: list[ranges.Measures]
    # Both have an entry for each trainable weight.
    weights: list[ranges.Measures]
    gradients: list[ranges.Measures]
    scale: float
    loss: float  # not scaled


class Sampler:
    """Compiles and runs the instrumented step of a compiled, built model."""

    def __init__(
        self,
        model: keras.Model,
        targets: Sequence[probe.Target],
        limits: _formats.Format,
        planned: planned_policies.Plan | None = None,
    ) -> None:
        self._model, self._found, self._limits = model, targets, limits
        # With a plan, layers are not compared with float32.
        self._planned = planned
        self._reference = planned_policies.reference(model)
        self._room = _CALLS_PER_LAYER * len(targets) + 1
        # The calls of the step and the rows of its loss, once it is traced.
        self._traced: tuple[tuple[Call, ...], tuple[int, ...]] = (), ()
        self._compiled = _compile(model, self._step)

    def __call__(self, state: Any, data: Any, override: float = 0.0) -> Sample:
        """Measures one step; 0 means the optimizer's scale."""
        values = self._compiled(state, data, ops.convert_to_tensor(override))
        arrays = [np.asarray(ops.convert_to_numpy(value)) for value in values]
        forward, backward, weights, gradients, scale, scaled = arrays
        calls, loss_inputs = self._traced
        used = sum(len(call.inputs) for call in calls) + len(loss_inputs)

        def read(table: np.ndarray) -> list[ranges.Measures]:
            return [ranges.from_vector(row, self._limits) for row in table]

        return Sample(
            calls,
            loss_inputs,
            read(forward[:, :_WIDTH]),
            forward[:, _WIDTH:],
            read(backward[: len(calls)]),
            read(backward[self._room : self._room + used]),
            read(weights),
            read(gradients),
            scale=float(scale),
            loss=float(scaled) / float(scale),
        )

    def _step(self, state: Any, data: Any, override: Any) -> tuple[Any, ...]:
        weights, others = _values(self._model, state)
        tokens = ops.zeros((2 * self._room, _WIDTH), "float32")
        with keras.StatelessScope(others):
            scale = self._scale(override)

        def losses(inputs: list[Any]) -> list[Any]:
            trainable = self._model.trainable_variables
            mapping = [*zip(trainable, inputs[1:], strict=True), *others]
            with keras.StatelessScope(mapping, collect_losses=True):
                rows, loss = self._forward(inputs[0], data)
            return [loss * scale, ops.stack(rows)]

        autocast: Any = contextlib.nullcontext()
        if self._planned is not None:
            autocast = keras_variables.autocast("float32")
        with graphs.policies(self._planned or {}), autocast:
            (loss, rows), back = differentiation.pullback(
                losses, [tokens, *weights], sparse=True
            )
            gradients = back([ops.ones_like(loss), ops.zeros_like(rows)])
        tables = self._table(weights), self._table(gradients[1:])
        return rows, gradients[0], *tables, scale, loss

    def _forward(self, tokens: Any, data: Any) -> tuple[list[Any], Any]:
        calls: list[Call] = []
        rows: list[Any] = []
        free = iter(range(self._room))
        has_weights = False

        def export(tensor: Any, row: int) -> Any:
            return differentiation.export_gradient(
                tensor,
                tokens[row],
                lambda gradient: ranges.vector(gradient, self._limits),
            )

        def measure_inputs(
            tensors: list[Any],
        ) -> tuple[list[Any], tuple[int, ...]]:
            """Measures the gradients of a call's inputs; returns their rows."""
            pairs = [*zip(tensors, free, strict=False)]
            measured = [
                export(tensor, self._room + row) for tensor, row in pairs
            ]
            left = tensors[len(pairs) :]
            return [*measured, *left], tuple(row for _, row in pairs)

        def on_call(call: probe.Call) -> Any:
            nonlocal has_weights
            tensors = call.tensors
            inputs: tuple[int, ...] = ()
            if has_weights:
                tensors, inputs = measure_inputs(tensors)
            outputs = call.proceed_with(tensors)
            has_weights |= bool(call.target.weights)
            leaves, index = probe.floats(outputs), len(calls)
            if not leaves or index >= self._room:
                return outputs
            rows.append(self._row(call, leaves))
            calls.append(Call(call.key[0], probe.dtype(leaves[0]), inputs))
            return probe.replaced(
                outputs, [export(leaves[0], index), *leaves[1:]]
            )

        with probe.watched(self._found, on_call):
            outputs = batches.outputs_of(self._model, data)
        leaves, loss_inputs = measure_inputs(probe.floats(outputs))
        self._traced = tuple(calls), loss_inputs
        outputs = probe.replaced(outputs, leaves)
        return rows, batches.loss_of(self._model, data, outputs)

    def _row(self, call: probe.Call, leaves: list[Any]) -> Any:
        leaves = [ops.stop_gradient(leaf) for leaf in leaves]
        measured = ranges.vector(leaves[0], self._limits)
        dtypes = {layer.compute_dtype for layer in call.target.layers}
        dtypes.update(map(probe.dtype, call.tensors))
        sixteen = dtypes.intersection(_formats.SIXTEEN_BIT)
        if self._planned is not None or not sixteen:
            return ops.concatenate([measured, ops.zeros((2,))])
        operation, limits = call.target.operation, self._limits
        exact = [
            unrounded(ops.stop_gradient(leaf), operation, limits)
            for leaf in call.tensors
        ]
        planned = call.target.planned(self._reference)
        with (
            graphs.policies(planned),
            keras_variables.autocast("float32"),
            host.trial(),
        ):
            right = probe.floats(call.try_with(exact))
        # The float32 call must not contribute gradients: that of the square
        # root in `_error` is NaN where the error is 0.
        error = _error(leaves[0], ops.stop_gradient(right[0]))
        return ops.concatenate([measured, error])

    def _scale(self, override: Any) -> Any:
        optimizer = self._model.optimizer
        if isinstance(optimizer, scaling.LossScaleOptimizer):
            current = optimizer.rule_scale()
        else:
            current = optimizer.scale_loss(ops.ones((), "float32"))
        return ops.where(override > 0, override, ops.cast(current, "float32"))

    def _table(self, tensors: Sequence[Any]) -> Any:
        if not tensors:
            return ops.zeros((0, _WIDTH))
        return ops.stack(
            [ranges.vector(tensor, self._limits) for tensor in tensors]
        )


class ProductSampler:
    """Compiles and runs a step that measures a model's float8 products."""

    def __init__(
        self, model: keras.Model, chosen: Sequence[keras.Layer]
    ) -> None:
        self._model, self._chosen = model, chosen
        self._called: list[keras.Layer] = []
        self._compiled = _compile(model, self._step)

    def __call__(
        self, state: Any, data: Any
    ) -> list[float8_products.Float8Product]:
        """Measures one step; the worst products come first."""
        if not self._chosen:
            return []
        table = ops.convert_to_numpy(self._compiled(state, data))
        return float8_products.read(self._called, table)

    def _step(self, state: Any, data: Any) -> Any:
        model = self._model
        weights, others = _values(model, state)
        trainable = zip(model.trainable_variables, weights, strict=True)
        mapping = [*trainable, *others]

        def loss_of() -> Any:
            with keras.StatelessScope(mapping, collect_losses=True):
                outputs = batches.outputs_of(model, data)
                return batches.loss_of(model, data, outputs)

        self._called, table = float8_products.measure(self._chosen, loss_of)
        return table


def _compile(model: keras.Model, step: Any) -> Any:
    """Compiles a step as the model compiles its own."""
    xla = bool(model.jit_compile)
    plain_jax = keras.backend.backend() == "jax" and not xla
    if model.run_eagerly or plain_jax:
        return step
    return programs.compiled(step, xla)


def _values(model: keras.Model, state: Any) -> tuple[list[Any], list[Any]]:
    """Returns the trainable weights, and values for other variables."""
    if state is None:
        return [weight.value for weight in model.trainable_variables], []
    trainable, non_trainable, optimizer, metrics = state
    others = [
        *zip(model.non_trainable_variables, non_trainable, strict=True),
        *zip(model.optimizer.variables, optimizer, strict=True),
        *zip(model.metrics_variables, metrics, strict=True),
    ]
    return list(trainable), others


def unrounded(tensor: Any, operation: Any, limits: _formats.Format) -> Any:
    """Returns numbers that may have been a 16-bit input before rounding.

    A layer that subtracts a large offset enlarges that rounding. Ids of an
    embedding were never rounded. Neither were numbers that the format holds
    with a bit to spare, such as a -1 that marks masked positions.
    """
    exact = ops.cast(tensor, "float32")
    is_lookup = isinstance(operation, keras.layers.Embedding)
    if probe.dtype(tensor) not in _formats.SIXTEEN_BIT or is_lookup:
        return exact
    # Equal inputs may have differed before, so the position decides whether a
    # number moves up or down.
    places = ops.cast(ops.arange(ops.size(exact)), "float32")
    signs = ops.sign(ops.sin(places * _SHUFFLE))
    step = limits.epsilon * _MEAN_ROUNDING
    moved = exact * (1.0 + step * ops.reshape(signs, ops.shape(exact)))
    # Dekker's split finds the numbers whose last digit in the format is zero.
    # Of float32's 24 bits it keeps one fewer than the format has.
    shifted = exact * (2.0**24 * limits.epsilon + 1.0)
    is_short = shifted - (shifted - exact) == exact
    return ops.where(is_short, exact, moved)


def _error(near: Any, exact: Any) -> Any:
    """Returns two numbers: the relative error, and whether float32 is bad."""
    near = ops.cast(near, "float32")
    fine, alike = ops.isfinite(exact), ops.isfinite(near)
    right = ops.where(fine, exact, 0.0)
    largest = ops.max(ops.abs(right))
    # Squares of 1e30 would overflow float32, so the largest value is the unit.
    unit = ops.where(largest > 0, largest, 1.0)
    wrong = ops.where(fine & alike, near - right, 0.0) / unit
    size = ops.sum(ops.square(right / unit))
    error = ops.sqrt(ops.sum(ops.square(wrong)) / ops.maximum(size, 1e-30))
    error = ops.where(ops.any(fine & ~alike), np.float32(np.inf), error)
    return ops.stack([error, ops.cast(~ops.all(fine), "float32")])
