"""One instrumented training step: measured on the device, nothing changed."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from tfmix import _formats
from tfmix._keras import layers as host
from tfmix.callbacks import deviation
from tfmix.conversion import trial_policies
from tfmix.doctor import heads, probe, pullback, ranges
from tfmix.policy.in_force import carried

# The columns of a forward row: those of `measures`, then these.
ERROR, BROKEN, HEAD = "relative_error", "broken", "are_probabilities"
FORWARD_COLUMNS = (*ranges.COLUMNS, ERROR, BROKEN, HEAD)
_WIDTH = len(ranges.COLUMNS)
# Rows kept for gradients of calls: enough for layers that are shared.
_CALLS_PER_LAYER = 4


@dataclasses.dataclass(frozen=True)
class Call:
    """What is known of one call when the step is traced.

    Attributes:
        target: Index of the layer.
        dtype: Compute dtype of what it returns.
    """

    target: int
    dtype: str


@dataclasses.dataclass(frozen=True)
class Sample:
    """The numbers of one step, on the host.

    Attributes:
        calls: The calls, in the order in which they ended.
        forward: One row of `FORWARD_COLUMNS` for each.
        backward: One row of `measures.COLUMNS` for each: its outputs'
            gradients.
        weights: One row for each trainable weight.
        gradients: One row for each trainable weight's gradient.
        scale: The loss scale of the step.
        loss: The loss, not scaled.
    """

    calls: tuple[Call, ...]
    forward: np.ndarray
    backward: np.ndarray
    weights: np.ndarray
    gradients: np.ndarray
    scale: float
    loss: float


class Sampler:
    """Compiles and runs the instrumented step of one model.

    Args:
        model: A compiled, built model.
        found: What is watched.
        limits: The 16-bit format.
        planned: Dtypes to run under instead of the model's own; None for
            those. The comparison with float32 is left out then.
    """

    def __init__(
        self,
        model: Any,
        found: Sequence[probe.Target],
        limits: _formats.Format,
        planned: trial_policies.Plan | None = None,
    ) -> None:
        self._model = model
        self._found = found
        self._limits = limits
        self._planned = planned
        self._reference = trial_policies.reference(model)
        self._room = _CALLS_PER_LAYER * len(found) + 1
        self._calls: list[Call] = []
        self._compiled = self._compile()

    def __call__(self, state: Any, data: Any, scale: float = 0.0) -> Sample:
        """Measures one step.

        Args:
            state: On JAX, the lists of values that the training step gets;
                on TensorFlow None, as the variables hold them.
            data: The batch as the training step gets it.
            scale: The loss scale; 0 for the optimizer's.

        Returns:
            The `Sample`, copied to the host.
        """
        values = self._compiled(state, data, ops.convert_to_tensor(scale))
        arrays = [np.asarray(ops.convert_to_numpy(one)) for one in values]
        forward, backward, weights, gradients, used, scaled = arrays
        calls = tuple(self._calls)
        return Sample(
            calls=calls,
            forward=forward,
            backward=backward[: len(calls)],
            weights=weights,
            gradients=gradients,
            scale=float(used),
            loss=float(scaled) / float(used),
        )

    def _compile(self) -> Any:
        if self._model.run_eagerly:
            return self._step
        if keras.backend.backend() == "jax":
            import jax

            return (
                jax.jit(self._step) if self._model.jit_compile else self._step
            )
        import tensorflow as tf

        return tf.function(
            self._step,
            jit_compile=bool(self._model.jit_compile),
            autograph=False,
            reduce_retracing=True,
        )

    def _step(self, state: Any, data: Any, override: Any) -> tuple[Any, ...]:
        self._calls = []
        variables, others = self._values(state)
        tokens = ops.zeros((self._room, _WIDTH), "float32")
        weights = [value for _, value in variables]

        def losses(inputs: list[Any]) -> list[Any]:
            trainable = [variable for variable, _ in variables]
            mapping = [*zip(trainable, inputs[1:], strict=True), *others]
            with keras.StatelessScope(mapping, collect_losses=True):
                rows, loss = self._forward(inputs[0], data)
                scale = self._scale(override)
            return [loss * scale, ops.stack(rows)]

        planned = self._planned or {}
        with host.policies(planned), self._autocast():
            (loss, rows), back = pullback.pullback(
                losses, [tokens, *weights], sparse=True
            )
            gradients = back([ops.ones_like(loss), ops.zeros_like(rows)])
        return (
            rows,
            gradients[0],
            self._table(weights),
            self._table(gradients[1:]),
            self._used_scale(others, override),
            loss,
        )

    def _forward(self, tokens: Any, data: Any) -> tuple[list[Any], Any]:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        rows: list[Any] = []
        made: dict[int, int] = {}
        alive: list[Any] = []
        busy: list[bool] = []

        def on_call(call: probe.Call) -> Any:
            outputs = call.proceed()
            leaves = probe.floats(outputs)
            if busy or not leaves or len(rows) >= self._room:
                return outputs
            index = len(rows)
            busy.append(True)
            try:
                rows.append(self._row(call, leaves))
            finally:
                busy.pop()
            dtype = keras.backend.standardize_dtype(leaves[0].dtype)
            self._calls.append(Call(call.key[0], dtype))
            sent = pullback.export_gradient(
                leaves[0],
                tokens[index],
                lambda grad: ranges.vector(grad, self._limits),
            )
            # What a layer hands on from one inside it is the inner one's.
            made[id(sent)] = made.get(id(leaves[0]), index)
            alive.append(sent)
            return probe.replaced(outputs, [sent, *leaves[1:]])

        with probe.watched(self._found, on_call), carried.outputs_as_made():
            if getattr(self._model, "_call_has_training_arg", False):
                outputs = self._model(x, training=True)
            else:
                outputs = self._model(x)
        self._mark_probabilities(made, outputs, rows)
        loss = self._model._compute_loss(
            x=x, y=y, y_pred=outputs, sample_weight=sample_weight, training=True
        )
        return rows, ops.cast(loss, "float32")

    def _mark_probabilities(
        self, made: dict[int, int], outputs: Any, rows: list[Any]
    ) -> None:
        for leaf in tree.flatten(outputs):
            index = made.get(id(leaf), -1)
            if index >= 0:
                head = heads.looks_like_probabilities(ops.stop_gradient(leaf))
                rows[index] = ops.append(rows[index][:-1], head)

    def _row(self, call: probe.Call, leaves: list[Any]) -> Any:
        leaves = [ops.stop_gradient(leaf) for leaf in leaves]
        measured = ranges.vector(leaves[0], self._limits)
        if self._planned is not None or not self._is_sixteen_bit(call):
            return ops.concatenate([measured, ops.zeros((3,))])
        operation, limits = call.target.operation, self._limits
        exact = [
            deviation.unrounded(ops.stop_gradient(leaf), operation, limits)
            for leaf in call.tensors
        ]
        planned = {
            layer: self._reference[layer]
            for layer in call.target.layers
            if layer in self._reference
        }
        with host.policies(planned), host.autocast("float32"), host.trial():
            right = probe.floats(call.proceed_with(exact))
        # The weights were read again: no gradient may come from there, as
        # that of a square root at an error of 0 would be NaN.
        error = deviation.error(leaves[0], ops.stop_gradient(right[0]))
        return ops.concatenate([measured, error, ops.zeros((1,))])

    def _is_sixteen_bit(self, call: probe.Call) -> bool:
        layers = call.target.layers
        dtypes = {layer.compute_dtype for layer in layers}
        dtypes |= {
            keras.backend.standardize_dtype(leaf.dtype) for leaf in call.tensors
        }
        return bool(dtypes.intersection(_formats.SIXTEEN_BIT))

    @contextlib.contextmanager
    def _autocast(self) -> Iterator[None]:
        if self._planned is None:
            yield
            return
        with host.autocast("float32"):
            yield

    def _values(self, state: Any) -> tuple[list[Any], list[Any]]:
        model = self._model
        if state is None:
            pairs = [(one, one.value) for one in model.trainable_variables]
            return pairs, []
        trainable, non_trainable, optimizer, metrics = state
        others = [
            *zip(model.non_trainable_variables, non_trainable, strict=True),
            *zip(model.optimizer.variables, optimizer, strict=True),
            *zip(model.metrics_variables, metrics, strict=True),
        ]
        return list(
            zip(model.trainable_variables, trainable, strict=True)
        ), others

    def _scale(self, override: Any) -> Any:
        current = self._model.optimizer.scale_loss(ops.ones((), "float32"))
        return ops.where(override > 0, override, ops.cast(current, "float32"))

    def _used_scale(self, others: list[Any], override: Any) -> Any:
        with keras.StatelessScope(others):
            return self._scale(override)

    def _table(self, tensors: Sequence[Any]) -> Any:
        if not tensors:
            return ops.zeros((0, _WIDTH))
        return ops.stack([ranges.vector(one, self._limits) for one in tensors])
