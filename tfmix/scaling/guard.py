"""A train step that leaves no trace when it is skipped."""

from collections.abc import Callable, Mapping
from typing import Any

import keras
from keras import ops

from tfmix import _arguments
from tfmix._keras import (
    compilation,
    compile_method,
    layers,
    model_methods,
    training,
)
from tfmix._keras import variables as keras_variables
from tfmix.scaling import deciding_callbacks, skipped_step_logs
from tfmix.scaling import optimizer as optimizers


def guard(model: keras.Model) -> keras.Model:
    """Makes a model's whole train step atomic.

    The optimizer skips a step whose gradients are not finite, but by then
    the forward pass has already written: BatchNormalization has averaged an
    infinity into its statistics, and the epoch's loss and metrics are NaN
    until it ends. In a guarded model a skipped step gives every float
    variable that is not trained, and every metric, its old value back; in a
    `train_step` of your own also weights that the optimizer is not given,
    such as averages of others. The step's logs are those of the metrics
    without it; where no step has been applied since they were reset, the
    skipped batch's own, or NaN if these are not finite.

    Under a 16-bit tfmix policy `compile` does this by itself. In float32 or
    bfloat16 compile with `LossScaleOptimizer(optimizer,
    loss_scale=NoLossScale())` to use it. Integer state, such as the seeds of
    dropout, moves on. A step that is applied pays for one read of the
    guarded variables.

    Args:
        model: A `keras.Model`, compiled or not. A `train_step` of its own is
            kept and guarded.

    Returns:
        The model itself.

    Raises:
        TypeError: If `model` is not a Keras 3 model.
        ValueError: If it is compiled with an optimizer that skips no steps;
            in `fit`, if it was compiled with such a one since.

    Examples:
        >>> model = keras.Sequential([keras.layers.Dense(1)])
        >>> model.compile(optimizers.LossScaleOptimizer("adam"), loss="mse")
        >>> guard(model) is model
        True
    """
    _arguments.model(model)
    if getattr(model, "compiled", False):
        _check_optimizer(model)
    put_on(model, asked_for=True)
    return model


def put_on(model: keras.Model, *, asked_for: bool | None = None) -> None:
    """Guards a model; one that nobody asked for gives way to any optimizer."""
    before = model_methods.part(model, model_methods.GUARD)
    if asked_for is None:
        asked_for = isinstance(before, _Guard) and before.asked_for
    model_methods.put(model, model_methods.GUARD, _Guard(model, asked_for))
    # A step that was compiled before would go on without the guard.
    model.train_function = None


def is_guarded(model: keras.Model) -> bool:
    """Says whether a skipped step of the model leaves no trace."""
    return model_methods.part(model, model_methods.GUARD) is not None


def _skips(model: keras.Model) -> bool:
    optimizer = getattr(model, "optimizer", None)
    return isinstance(optimizer, optimizers.LossScaleOptimizer)


def _check_optimizer(model: keras.Model) -> None:
    if not _skips(model):
        raise ValueError(
            "A model can be guarded only if its optimizer can skip a step. "
            f"Received: optimizer={model.optimizer!r}. Compile with "
            "tfmix.LossScaleOptimizer(optimizer), or, for a float32 or "
            "bfloat16 model, with tfmix.LossScaleOptimizer(optimizer, "
            "loss_scale=tfmix.NoLossScale())."
        )


@keras.saving.register_keras_serializable("tfmix")
class Guarded:
    """Says in a model's file that it was guarded; `compile` gets it of there.

    Args:
        alone: Boolean, whether the model has no record of a policy: it is to
            compute as it did. Defaults to `False`.
    """

    def __init__(self, alone: bool = False) -> None:
        self.alone = alone

    def get_config(self) -> dict[str, bool]:
        """Returns the arguments that make it."""
        return {"alone": self.alone}

    @classmethod
    def from_config(cls, config: Mapping[str, bool]) -> "Guarded":
        """Makes it of a file, whose model is compiled with it next."""
        # Keras's own `compile` does not know it.
        compile_method.stand_by()
        return cls(**config)


class _Guard:
    """The guard of one model: what stands around its methods."""

    def __init__(self, model: keras.Model, asked_for: bool) -> None:
        self._model = model
        self.asked_for = asked_for
        logs = self._logs = skipped_step_logs.StepLogs(model)
        tensorflow = keras.backend.backend() == "tensorflow"
        self.wrappers: Mapping[str, model_methods.Wrapper] = {
            "train_step": self._on_tensorflow if tensorflow else self._on_jax,
            "fit": deciding_callbacks.fit(model),
            "reset_metrics": logs.reset_metrics,
            "get_metrics_result": logs.metrics_result,
            "get_compile_config": self._compile_config,
        }

    @property
    def _gives_way(self) -> bool:
        return not self.asked_for and not _skips(self._model)

    def _run(self, original: Callable, *args: Any) -> tuple[Any, set[int]]:
        """Steps; returns the result, and the `id`s of what was optimized."""
        _check_optimizer(self._model)
        guarded = optimizers.guarded_step(self._model.optimizer)
        with guarded as stepped, self._logs.noted():
            return original(*args), stepped

    def _on_tensorflow(self, original: Callable, data: Any) -> Any:
        if self._gives_way:
            return original(data)
        import tensorflow as tf

        from tfmix.step import replicas

        watched = map(compilation.held, self._watched())
        before = {id(v): tf.convert_to_tensor(v) for v in watched}

        def note(create: Callable, **kwargs: Any) -> Any:
            variable = create(**kwargs)
            is_slot = self._model.optimizer.is_building
            if not (is_slot or kwargs.get("trainable")):
                before[id(variable)] = tf.convert_to_tensor(variable)
            return variable

        # A model, or a metric, may be built in its first step.
        with tf.variable_creator_scope(note):
            logs, stepped = self._run(original, data)
        left = [v for v in self._watched() if id(v) not in stepped]
        applied = self._model.optimizer.last_step_applied()
        pairs = [
            (keras_variables.local(variable), before[id(variable)])
            for variable in map(compilation.held, left)
            if id(variable) in before
        ]
        with replicas.one_replica(self._model.metrics_variables):
            # Frozen weights are not written: to put them back, XLA would
            # copy them at every step.
            written = [
                (variable, value)
                for variable, value in pairs
                if compilation.may_be_written(variable)
            ]
            self._put_back(written, applied)
            return self._logs.told(logs, applied)

    def _on_jax(self, original: Callable, state: Any, data: Any) -> tuple:
        if self._gives_way:
            return tuple(original(state, data))
        model = self._model
        weights_before, state_before, _, metrics_before = state
        result, stepped = self._run(original, state, data)
        logs, (weights, others, slots, metrics) = result
        mapping = zip(model.optimizer.variables, slots, strict=True)
        with keras.StatelessScope(state_mapping=mapping):
            applied = model.optimizer.last_step_applied()
        others = [
            self._restored(applied, *pair) if _is_float(pair[0]) else pair[0]
            for pair in zip(others, state_before, strict=True)
        ]
        left = set(map(id, training.weights_of_own_step(model))) - stepped
        states = zip(
            model.trainable_variables, weights, weights_before, strict=True
        )
        weights = [
            ops.where(applied, new, old) if id(variable) in left else new
            for variable, new, old in states
        ]
        metrics = [
            self._restored(applied, *pair)
            for pair in zip(metrics, metrics_before, strict=True)
        ]
        variables = [
            *(model.trainable_variables + model.non_trainable_variables),
            *(model.optimizer.variables + model.metrics_variables),
        ]
        values = [*weights, *others, *slots, *metrics]
        mapping = zip(variables, values, strict=True)
        with keras.StatelessScope(state_mapping=mapping):
            logs = self._logs.told(logs, applied)
        return logs, (weights, others, slots, metrics)

    def _put_back(self, written: list, applied: Any) -> None:
        """Gives variables, each with an old value, that if not applied."""
        import tensorflow as tf

        def restore() -> Any:
            for variable, old in written:
                variable.assign(self._as_before(variable, old))
            return tf.constant(False)

        if compilation.by_xla():
            for variable, old in written:
                variable.assign(self._restored(applied, variable, old))
        else:
            tf.cond(applied, lambda: tf.constant(True), restore)

    def _restored(self, applied: Any, new: Any, old: Any) -> Any:
        if new is old:
            return new
        return ops.where(applied, new, self._as_before(new, old))

    def _as_before(self, new: Any, old: Any) -> Any:
        """Returns old numbers; of a user's step new ones for a NaN before it.

        Sums of gradients that the step has set to zero stay so.
        """
        if not (_is_float(old) and training.has_own_step(self._model)):
            return old
        is_mended = ops.logical_and(
            ops.logical_not(ops.isfinite(old)), ops.isfinite(new)
        )
        return ops.where(is_mended, new, old)

    def _watched(self) -> list[keras.Variable]:
        """Returns what a skipped step must not have changed (TensorFlow)."""
        others = filter(_is_float, self._model.non_trainable_variables)
        metrics = training.metrics(self._model)
        reported = (v for metric in metrics for v in metric.variables)
        own = training.weights_of_own_step(self._model)
        held = filter(_is_float, layers.unlisted_variables(self._model))
        return [*others, *reported, *own, *held]

    def _compile_config(self, original: Callable) -> Any:
        """Notes in a saved model that it was guarded."""
        config = original()
        optimizer = (config or {}).get("optimizer")
        name = isinstance(optimizer, dict) and optimizer["class_name"]
        if name != "LossScaleOptimizer":
            return config
        record = model_methods.part(self._model, model_methods.RULES)
        guarded = Guarded(alone=record is None)
        saved = keras.saving.serialize_keras_object(guarded)
        return {**config, "guarded": saved}


def _is_float(value: Any) -> bool:
    dtype = keras.backend.standardize_dtype(value.dtype)
    return keras.backend.is_float_dtype(dtype)
