"""A train step that leaves no trace when it is skipped."""

import functools
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from tfmix import _arguments
from tfmix.scaling import guard_logs, settings
from tfmix.scaling import optimizer as optimizers

_MARK = "_tfmix_unguarded_train_step"


def guard(model: Any, retries: int = 0) -> Any:
    """Makes a model's whole train step atomic.

    The optimizer skips a step whose gradients are not finite, but by then
    the forward pass has already written: BatchNormalization has averaged an
    infinity into its statistics, and the epoch's loss and metrics are NaN
    until it ends. In a guarded model a skipped step gives every float
    variable that is not trained, and every metric, its old value back.

    Under a 16-bit tfmix policy `compile` does this by itself. In float32 or
    bfloat16 compile with `LossScaleOptimizer(optimizer,
    loss_scale=NoLossScale())` to use it. Integer state, such as the seeds of
    dropout, moves on. A step that is applied pays for one read of the
    guarded variables.

    Args:
        model: A `keras.Model`, compiled or not. A `train_step` of its own is
            kept and guarded.
        retries: Integer, how often a skipped batch is tried again at once,
            at the loss scale that the skip has left. Each try counts as a
            skipped step if it fails. Defaults to `0`: one batch in 2,000 is
            not worth a second backward pass in the compiled step.

    Returns:
        The model itself.

    Raises:
        TypeError: If `model` is not a Keras 3 model.
        ValueError: If it is compiled with an optimizer that skips no steps,
            or `retries` is negative.

    Example:
        >>> model = keras.Sequential([keras.layers.Dense(1)])
        >>> model.compile(optimizers.LossScaleOptimizer("adam"), loss="mse")
        >>> guard(model) is model
        True
    """
    if not isinstance(model, keras.Model):
        raise TypeError(
            "`model` must be a Keras 3 model (keras.Model). Received: "
            f"model={model!r} of type {type(model).__module__}."
            f"{type(model).__name__}."
        )
    if retries != 0:
        retries = _arguments.count("retries", retries)
    if getattr(model, "compiled", False):
        _check_optimizer(model)
    original = getattr(model, _MARK, model.train_step)
    tensorflow = keras.backend.backend() == "tensorflow"
    wrap = _guarded_tensorflow if tensorflow else _guarded_jax
    vars(model)[_MARK] = original
    vars(model)["train_step"] = wrap(model, original, retries)
    vars(model)["get_metrics_result"] = functools.partial(
        guard_logs.after_epoch, model
    )
    vars(model)["get_compile_config"] = functools.partial(
        _compile_config, model
    )
    # A step that was compiled before would go on without the guard.
    model.train_function = None
    return model


def is_guarded(model: Any) -> bool:
    """Returns whether `guard` has made the model's train step atomic."""
    return _MARK in vars(model)


def _compile_config(model: Any) -> Any:
    return settings.with_guarded(type(model).get_compile_config(model))


def _check_optimizer(model: Any) -> None:
    if not isinstance(model.optimizer, optimizers.LossScaleOptimizer):
        raise ValueError(
            "A model can be guarded only if its optimizer can skip a step. "
            f"Received: optimizer={model.optimizer!r}. Compile with "
            "tfmix.LossScaleOptimizer(optimizer), or, for a float32 or "
            "bfloat16 model, with tfmix.LossScaleOptimizer(optimizer, "
            "loss_scale=tfmix.NoLossScale())."
        )


def _guarded_tensorflow(
    model: Any, original: Callable, retries: int
) -> Callable:
    import tensorflow as tf

    from tfmix.scaling.step import replicas

    def attempt(data: Any) -> tuple[Any, Any]:
        watched = _watched(model)
        before = [tf.identity(variable.value) for variable in watched]
        with optimizers.guarded_step(model.optimizer):
            logs = original(data)
        applied = model.optimizer.last_step_applied()

        def restore() -> Any:
            for variable, value in zip(watched, before, strict=True):
                variable.value.assign(value)
            return tf.constant(False)

        with replicas.one_replica(watched):
            tf.cond(applied, lambda: tf.constant(True), restore)
        return logs, applied

    def attempt_again(data: Any) -> Any:
        replicas.check_single_replica("guard(model, retries=...)")

        tf.while_loop(
            lambda count, applied: ~applied & (count <= retries),
            lambda count, _: (count + 1, attempt(data)[1]),
            (tf.constant(0), tf.constant(False)),
        )
        return guard_logs.metrics_result(model)

    @functools.wraps(original)
    def train_step(data: Any) -> Any:
        _check_optimizer(model)
        if retries:
            return attempt_again(data)
        logs = attempt(data)[0]
        return guard_logs.after_step(model, logs)

    return train_step


def _guarded_jax(model: Any, original: Callable, retries: int) -> Callable:
    import jax

    def attempt(state: Any, data: Any) -> tuple[Any, Any, Any]:
        with optimizers.guarded_step(model.optimizer):
            logs, after = original(state, data)
        mapping = zip(model.optimizer.variables, after[2], strict=True)
        with keras.StatelessScope(state_mapping=mapping):
            applied = model.optimizer.last_step_applied()
        after = (
            after[0],
            _restored(applied, after[1], state[1], only_float=True),
            after[2],
            _restored(applied, after[3], state[3], only_float=False),
        )
        return logs, after, applied

    def attempt_again(state: Any, data: Any) -> tuple[Any, Any]:
        def body(carry: Any) -> Any:
            count, _, state = carry
            _, after, applied = attempt(state, data)
            return count + 1, applied, jax.tree.map(_like, after, state)

        _, _, state = jax.lax.while_loop(
            lambda carry: ~carry[1] & (carry[0] <= retries),
            body,
            (0, False, jax.tree.map(jax.numpy.asarray, state)),
        )
        return {}, state

    @functools.wraps(original)
    def train_step(state: Any, data: Any) -> tuple[Any, Any]:
        _check_optimizer(model)
        run = attempt_again if retries else attempt
        logs, state, *_ = run(state, data)
        variables = model.optimizer.variables + model.metrics_variables
        mapping = list(zip(variables, state[2] + state[3], strict=True))
        with keras.StatelessScope(state_mapping=mapping):
            return guard_logs.after_step(model, logs), state

    return train_step


def _watched(model: Any) -> list[Any]:
    """The variables that a skipped step must not have changed."""
    state = [v for v in model.non_trainable_variables if _is_float(v)]
    return state + list(model.metrics_variables)


def _restored(
    applied: Any, new: list[Any], old: list[Any], only_float: bool
) -> list[Any]:
    return [
        ops.where(applied, after, before)
        if _is_float(after) or not only_float
        else after
        for after, before in zip(new, old, strict=True)
    ]


def _like(value: Any, reference: Any) -> Any:
    return value.astype(reference.dtype)


def _is_float(value: Any) -> bool:
    dtype = keras.backend.standardize_dtype(value.dtype)
    return keras.backend.is_float_dtype(dtype)
