"""A train step, or a call in training, that leaves no trace of a bad batch."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import keras
from keras import ops, tree

from tfmix import _arguments
from tfmix._keras import (
    compilation,
    compile_method,
    layers,
    model_methods,
    training,
)
from tfmix._keras import variables as keras_variables
from tfmix.loss_scaling import all_finite, apply_if_finite
from tfmix.loss_scaling import optimizer as optimizers


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
        compile_method.watch()
        return cls(**config)


class _Guard:
    """The guard of one model: what stands around its methods."""

    def __init__(self, model: keras.Model, asked_for: bool) -> None:
        self._model = model
        self.asked_for = asked_for
        tensorflow = keras.backend.backend() == "tensorflow"
        self.wrappers: Mapping[str, model_methods.Wrapper] = {
            "train_step": self._on_tensorflow if tensorflow else self._on_jax,
            "get_metrics_result": self._metrics_result,
            "get_compile_config": self._compile_config,
        }

    @property
    def _gives_way(self) -> bool:
        return not self.asked_for and not _skips(self._model)

    def _on_tensorflow(self, original: Callable, data: Any) -> Any:
        if self._gives_way:
            return original(data)
        import tensorflow as tf

        from tfmix.loss_scaling import replicas

        before = {
            id(variable): compilation.read(variable)
            for variable in map(compilation.held, self._watched())
        }

        def note(create: Callable, **kwargs: Any) -> Any:
            variable = create(**kwargs)
            is_slot = self._model.optimizer.is_building
            if not (is_slot or kwargs.get("trainable")):
                before[id(variable)] = compilation.read(variable)
            return variable

        # A model, or a metric, may be built in its first step.
        with tf.variable_creator_scope(note):
            logs, stepped = self._run(original, data)
        pairs = [
            (keras_variables.local(variable), before[id(variable)])
            for variable in map(
                compilation.held,
                [v for v in self._watched() if id(v) not in stepped],
            )
            if id(variable) in before
        ]
        with replicas.one_replica(self._model.metrics_variables):
            return self._put_back(pairs, logs)

    def _on_jax(self, original: Callable, state: Any, data: Any) -> tuple:
        if self._gives_way:
            return tuple(original(state, data))
        model = self._model
        (logs, after), stepped = self._run(original, state, data)
        groups = (
            model.trainable_variables,
            model.non_trainable_variables,
            model.optimizer.variables,
            model.metrics_variables,
        )
        mapping: list = []
        before: dict[int, Any] = {}
        for group, new, old in zip(groups, after, state, strict=True):
            mapping += zip(group, new, strict=True)
            before |= zip(map(id, group), old, strict=True)
        pairs = [
            (variable, before[id(variable)])
            for variable in self._watched()
            if id(variable) in before and id(variable) not in stepped
        ]
        with keras.StatelessScope(state_mapping=mapping) as scope:
            logs = self._put_back(pairs, logs)
        value = scope.get_current_value
        return logs, tuple([*map(value, group)] for group in groups)

    def _run(self, original: Callable, *args: Any) -> tuple[Any, set[int]]:
        """Steps; returns the result, and the `id`s of what was optimized."""
        _check_optimizer(self._model)
        with optimizers.guarded_step(self._model.optimizer) as stepped:
            return original(*args), stepped

    def _put_back(self, pairs: list, logs: Any) -> Any:
        """Takes a skipped step back; returns what a step then reports.

        Args:
            pairs: Variables, each with what it held before the step.
            logs: What the step returned, of any structure.
        """
        applied = self._model.optimizer.last_step_applied()
        written = apply_if_finite.written(pairs)
        if training.has_own_step(self._model):
            written = [(v, _mended(v, old)) for v, old in written]
        apply_if_finite.put_back(applied, written)
        results = self._model.get_metrics_result()
        if not (isinstance(logs, dict) and isinstance(results, dict)):
            return logs
        own = {name: logs[name] for name in logs if name in results}
        without = {name: results[name] for name in own}
        return logs | tree.map_structure(
            functools.partial(
                self._reported, applied, all_finite.all_finite(own)
            ),
            own,
            without,
        )

    def _reported(self, applied: Any, fine: Any, own: Any, without: Any) -> Any:
        """Returns what a metric reports: without a skipped step, if it can.

        Where no step was applied since the reset, the skipped batch's own
        result, or NaN if one of these is not finite.
        """
        if keras.backend.is_float_dtype(own.dtype):
            own = ops.where(ops.logical_or(applied, fine), own, float("nan"))
        stays = ops.logical_or(applied, ops.logical_not(self._is_measured()))
        return ops.where(stays, own, without)

    def _metrics_result(self, original: Callable) -> Any:
        """Hides metrics that skipped steps left empty from the end of an epoch.

        Keras then takes the last step's logs, as it does for other keys.
        """
        results = original()
        if self._gives_way or not results:
            return results
        empty = ops.logical_not(self._is_measured())
        return {} if not compilation.is_symbolic(empty) and empty else results

    def _is_measured(self) -> Any:
        """Boolean scalar: has a mean among the metrics seen any batch?"""
        counts = [
            metric.count
            for metric in training.metrics(self._model)
            if isinstance(metric, keras.metrics.Mean)
        ]
        if not counts:
            return ops.convert_to_tensor(True)
        return ops.any(ops.stack([ops.not_equal(c, 0) for c in counts]))

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


def _mended(variable: Any, old: Any) -> Any:
    """Returns old numbers, new ones for a NaN that a user's own step mended.

    Sums of gradients that the step has set to zero stay so.
    """
    if not _is_float(old):
        return old
    new = compilation.read(variable)
    is_mended = ops.logical_and(
        ops.logical_not(ops.isfinite(old)), ops.isfinite(new)
    )
    return ops.where(is_mended, new, old)


def kept_finite(
    model: keras.Model, call: Callable, *args: Any, **kwargs: Any
) -> Any:
    """Calls a model in training; takes back what it wrote if that is NaN.

    For a call outside of a guard: in a loop of one's own, or with several
    optimizers, nobody knows when the step is over. The step is skipped, but
    BatchNormalization has written by then.

    Args:
        model: The model. One that is guarded is only called.
        call: What calls it.
        *args: Positional arguments of the call.
        **kwargs: Keyword arguments of the call.

    Returns:
        What `call` returns. If a number of a float variable that is not
        trained was finite before and is not now, all of these variables have
        their old values.
    """
    in_training = kwargs.get("training")
    if in_training is None:
        in_training = layers.is_training()
    if is_guarded(model) or not in_training:
        return call(*args, **kwargs)
    unlisted = layers.unlisted_variables(model)
    variables = [
        variable
        for variable in [*model.non_trainable_variables, *unlisted]
        if _is_float(variable)
    ]
    # As they are stored, not as layers in 16 bit read them.
    with layers.autocast(None):
        before = [compilation.read(variable) for variable in variables]
    outputs = call(*args, **kwargs)
    with layers.autocast(None):
        _restore_if_lost(variables, before)
    return outputs


def _restore_if_lost(variables: list[keras.Variable], before: list) -> None:
    written = apply_if_finite.written(zip(variables, before, strict=True))
    if not written:
        return
    lost = [
        ops.reshape(_is_lost(old, compilation.read(variable)), (-1,))
        for variable, old in written
    ]
    is_bad = ops.any(ops.concatenate(lost))
    apply_if_finite.put_back(ops.logical_not(is_bad), written)


def _is_lost(old: Any, new: Any) -> Any:
    was_finite = ops.isfinite(old)
    return ops.logical_and(was_finite, ops.logical_not(ops.isfinite(new)))


def _is_float(value: Any) -> bool:
    dtype = keras.backend.standardize_dtype(value.dtype)
    return keras.backend.is_float_dtype(dtype)
