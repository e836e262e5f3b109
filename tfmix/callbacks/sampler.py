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
from tfmix.doctor import latent, probe, pullback, ranges
from tfmix.policy.in_force import carried
from tfmix.scaling import optimizer as scaling

# A forward row holds `ranges.COLUMNS`, the relative error, whether float32 is
# not finite either, and whether these are the model's probabilities.
_WIDTH = len(ranges.COLUMNS)
# Rows kept for gradients of calls: enough for layers that are shared.
_CALLS_PER_LAYER = 4
# Stands for the loss among the calls that use a tensor.
LOSS = -1


@dataclasses.dataclass(frozen=True)
class Call:
    """What is known of one call when the step is traced."""

    # Index of the layer, and the dtype of what it returns.
    target: int
    dtype: str
    # Whether other calls returned all of its inputs as they are, with no cast
    # and no other operation in between.
    inputs_known: bool


@dataclasses.dataclass(frozen=True)
class Use:
    """A call of a layer on the very tensor that an earlier call returned."""

    # Index of the earlier call, and of the layer that uses it, or `LOSS`.
    maker: int
    target: int
    # The row of `Sample.shares` with the part of the gradient that this use
    # computes; None for the first use.
    share: int | None


@dataclasses.dataclass(frozen=True)
class Sample:
    """The numbers of one step, on the host."""

    # In the order in which the calls ended.
    calls: tuple[Call, ...]
    uses: tuple[Use, ...]
    # A row for each call's output, and for its gradient.
    forward: np.ndarray
    backward: np.ndarray
    # A row for the part of a gradient that one use computed.
    shares: np.ndarray
    # A row for each trainable weight, and for its gradient.
    weights: np.ndarray
    gradients: np.ndarray
    scale: float
    # Not scaled.
    loss: float


class _Trace:
    """What becomes known of the calls of one step while it is traced."""

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self.calls: list[Call] = []
        self.uses: list[Use] = []
        self.shares = 0
        # Index of the call that made a tensor, and of the inner one where an
        # outer layer hands its output on; kept alive, so ids stay unique.
        self.made: dict[int, int] = {}
        self.made_first: dict[int, int] = {}
        self.alive: list[Any] = []

    def add(self, call: probe.Call, row: Any, output: Any, sent: Any) -> None:
        """Notes a call that is over, its row, and what is handed on for it."""
        index = len(self.rows)
        self.rows.append(row)
        dtype = keras.backend.standardize_dtype(output.dtype)
        # A layer around others may also use what those inside it return.
        known = call.target.whole and all(
            id(leaf) in self.made for leaf in call.tensors
        )
        self.calls.append(Call(call.key[0], dtype, known))
        first = self.made_first.get(id(output), index)
        self.made[id(sent)], self.made_first[id(sent)] = index, first
        self.alive += [sent, call.tensors]

    def forget_tensors(self) -> list[Any]:
        """Returns the rows; no tensor may outlive the traced function."""
        rows, self.rows = self.rows, []
        self.made, self.made_first, self.alive = {}, {}, []
        return rows

    def use(self, tensor: Any, target: int) -> int | None:
        """Notes a use of a tensor; returns the row for its share, if any."""
        maker = self.made.get(id(tensor))
        if maker is None:
            return None
        share = None
        if any(use.maker == maker for use in self.uses):
            share, self.shares = self.shares, self.shares + 1
        self.uses.append(Use(maker, target, share))
        return share


class Sampler:
    """Compiles and runs the instrumented step of one compiled, built model.

    Under dtypes that are `planned`, layers are not compared with float32.
    """

    def __init__(
        self,
        model: keras.Model,
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
        self._trace = _Trace()
        self._compiled = self._compile()

    def __call__(self, state: Any, data: Any, scale: float = 0.0) -> Sample:
        """Measures one step, and copies the numbers to the host.

        `state` is, on JAX, the lists of values that the training step gets;
        on TensorFlow None, as the variables hold them. A scale of 0 stands
        for the optimizer's.
        """
        values = self._compiled(state, data, ops.convert_to_tensor(scale))
        arrays = [np.asarray(ops.convert_to_numpy(one)) for one in values]
        forward, backward, weights, gradients, used, scaled = arrays
        trace, room = self._trace, self._room
        return Sample(
            calls=tuple(trace.calls),
            uses=tuple(trace.uses),
            forward=forward,
            backward=backward[: len(trace.calls)],
            shares=backward[room : room + trace.shares],
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
        variables, others = self._values(state)
        tokens = ops.zeros((2 * self._room, _WIDTH), "float32")
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
        trace = self._trace = _Trace()
        busy: list[bool] = []

        def on_call(call: probe.Call) -> Any:
            if busy:
                return call.proceed()
            outputs = call.proceed_with(self._given(call, tokens))
            leaves = probe.floats(outputs)
            if not leaves or len(trace.rows) >= self._room:
                return outputs
            busy.append(True)
            try:
                row = self._row(call, leaves)
            finally:
                busy.pop()
            sent = self._measured(leaves[0], tokens[len(trace.rows)])
            trace.add(call, row, leaves[0], sent)
            return probe.replaced(outputs, [sent, *leaves[1:]])

        with probe.watched(self._found, on_call), carried.outputs_as_made():
            outputs = host.call_in_training(self._model, x)
        for leaf in tree.flatten(outputs):
            trace.use(leaf, LOSS)
        self._mark_probabilities(outputs)
        loss = host.compute_loss(
            self._model,
            x=x,
            y=y,
            y_pred=outputs,
            sample_weight=sample_weight,
            training=True,
        )
        rows = trace.forget_tensors()
        return rows, ops.cast(loss, "float32")

    def _given(self, call: probe.Call, tokens: Any) -> list[Any]:
        """Returns a call's inputs, measured where others use them, too."""
        tensors, trace = call.tensors, self._trace
        if not call.target.whole:
            # The layers inside are what uses them.
            return tensors
        result = []
        for tensor in tensors:
            share = trace.use(tensor, call.key[0])
            if share is not None and share < self._room:
                given = self._measured(tensor, tokens[self._room + share])
                trace.made[id(given)] = trace.made[id(tensor)]
                trace.alive.append(given)
                tensor = given
            result.append(tensor)
        return result

    def _measured(self, tensor: Any, token: Any) -> Any:
        return pullback.export_gradient(
            tensor, token, lambda grad: ranges.vector(grad, self._limits)
        )

    def _mark_probabilities(self, outputs: Any) -> None:
        rows = self._trace.rows
        for leaf in tree.flatten(outputs):
            index = self._trace.made_first.get(id(leaf), -1)
            if index >= 0:
                head = latent.looks_like_probabilities(ops.stop_gradient(leaf))
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
        optimizer = self._model.optimizer
        if isinstance(optimizer, scaling.LossScaleOptimizer):
            # `scale_loss` would note that the loss was multiplied.
            current = optimizer.rule.current(optimizer.state())
        else:
            current = optimizer.scale_loss(ops.ones((), "float32"))
        return ops.where(override > 0, override, ops.cast(current, "float32"))

    def _used_scale(self, others: list[Any], override: Any) -> Any:
        with keras.StatelessScope(others):
            return self._scale(override)

    def _table(self, tensors: Sequence[Any]) -> Any:
        if not tensors:
            return ops.zeros((0, _WIDTH))
        return ops.stack([ranges.vector(one, self._limits) for one in tensors])
