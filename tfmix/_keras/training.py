"""Reads and changes how Keras compiles and trains a model."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras.src.trainers import compile_utils
from keras.src.trainers import trainer as trainers

from tfmix._keras import layers, replacing

# This class gives models `compile` and `fit`.
TRAINER: Any = getattr(trainers, "BaseTrainer", None) or trainers.Trainer

# The order of arguments of a model's methods. Each backend overrides these of
# `TRAINER`, but for `compile`, so others have no reason to replace them.
ORDERS = {
    name: [*inspect.signature(method).parameters][1:]
    for name, method in (
        ("fit", TRAINER.fit),
        ("compile", TRAINER.compile),
        ("summary", keras.Model.summary),
    )
}
# JAX's step is a function of the state.
STEP_ON_JAX = "state", "data"

# The first gives variables their first values before a step is made. Only
# TensorFlow's trainer calls the second before that.
BUILD = "_symbolic_build"
BEFORE_TRACING = "_maybe_symbolic_build"


def has_own_step(model: keras.Model) -> bool:
    """Returns whether a model's class defines its own `train_step`."""
    module = type(model).train_step.__module__ or ""
    return module.split(".")[0] != "keras"


def weights_of_own_step(model: keras.Model) -> list[keras.Variable]:
    """Lists the weights that a user's own `train_step` may write."""
    return list(model.trainable_variables) if has_own_step(model) else []


def metrics(model: keras.Model) -> list[keras.Metric]:
    """Returns a model's metrics, also those that `compile` has yet to build."""
    given = getattr(model, "_compile_metrics", None)
    if given is None or given.built:
        return list(model.metrics)
    nest = given._user_metrics, given._user_weighted_metrics
    leaves = keras.tree.flatten(nest)
    return [*model.metrics, *(x for x in leaves if isinstance(x, keras.Metric))]


def model_in_step(callback: keras.callbacks.Callback) -> keras.Model:
    """Returns a callback's model while JAX holds its state in a step."""
    # `callback.model` would bring the state back.
    model: keras.Model = callback._model
    return model


@contextlib.contextmanager
def state_in_variables(
    model: keras.Model, state: tuple | None = None
) -> Iterator[None]:
    """Gives weights the values that JAX's step gets, inside a block.

    They have none while `fit` runs, and the step frees these values.
    """
    trainable, non_trainable, *_ = state or ((), ())
    written = [
        *zip(model.trainable_variables, trainable, strict=bool(state)),
        *zip(model.non_trainable_variables, non_trainable, strict=bool(state)),
    ]
    before = [variable._value for variable, _ in written]
    for variable, value in written:
        variable._value = value
    try:
        yield
    finally:
        for (variable, _), value in zip(written, before, strict=True):
            variable._value = value


def join_fit(
    undo: contextlib.ExitStack,
    model: keras.Model,
    callback: keras.callbacks.Callback,
) -> None:
    """Calls a callback's methods of a run and its parts, until `undo`.

    It joins the `fit` that has just begun: the callbacks exist, and none was
    called yet. The arguments of `fit` stay as they came, because a function
    that others have put in its place may take no callbacks.
    """
    # Keras adds this callback to all others.
    history = getattr(model, "history", None)
    if not isinstance(history, keras.callbacks.History):
        return
    callback.set_params(history.params)
    callback.set_model(model)
    for name in (
        "on_train_begin",
        "on_epoch_begin",
        "on_epoch_end",
        "on_train_end",
    ):
        both = getattr(callback, name), getattr(history, name)
        replacing.swap(undo, history, name, _in_turn(*both))


def _in_turn(*functions: Callable) -> Callable:
    def call(*args: Any, **kwargs: Any) -> None:
        for function in functions:
            function(*args, **kwargs)

    return call


def build_before_tracing(model: keras.Model, **batch: Any) -> None:
    """Builds a model before TensorFlow traces its step.

    Float32 master weights start from the weights' values. A first value that is
    read from another variable would become part of the step, which XLA refuses,
    and loops may run before it.
    """
    if not layers.is_built(model):
        # JAX does the same; a model that cannot be built so is built in the
        # trace.
        with contextlib.suppress(RuntimeError):
            model._symbolic_build(**batch)


def build_for_training(model: keras.Model, data: Any) -> None:
    """Builds what a model trains with: losses, metrics, optimizer.

    `data` are symbolic inputs and targets.
    """
    # `fit` does this with its first batch.
    model._symbolic_build(data_batch=data)


def compile_loss(loss: Any, weights: Any = None, names: Any = None) -> Any:
    """Returns the function that `compile(loss=loss)` would train with."""
    return compile_utils.CompileLoss(
        loss=loss, loss_weights=weights, output_names=names
    )


def compiled_loss(model: Any) -> Any:
    """Returns a fresh copy of a model's compiled loss, None without one."""
    compiled = getattr(model, "_compile_loss", None)
    if compiled is None:
        return None
    return compile_loss(
        compiled._user_loss, compiled._user_loss_weights, compiled.output_names
    )


def losses(model: Any, outputs: Any) -> dict[tuple, Any]:
    """Returns the losses of a model's outputs, by the paths of these."""
    compiled = getattr(model, "_compile_loss", None)
    if compiled is None:
        return {}
    if not compiled.built:
        # The model's own loss is built with its targets, so a copy is used.
        compiled = compiled_loss(model)
        compiled.build(outputs, outputs)
    return {tuple(entry.path): entry.loss for entry in compiled._flat_losses}


def call_in_training(model: keras.Model, inputs: Any) -> Any:
    """Calls a model in training mode, if it has modes."""
    knows_modes = getattr(model, "_call_has_training_arg", False)
    return model(inputs, training=True) if knows_modes else model(inputs)


def adopt_optimizer(model: keras.Model, optimizer: Any, saved: Any) -> None:
    """Sets the optimizer of a compiled model, and the one its files name."""
    model.optimizer = optimizer
    config = getattr(model, "_compile_config", None)
    if config is not None:
        config.config["optimizer"] = saved
