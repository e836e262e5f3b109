"""Reads and changes how Keras compiles and trains a model."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras.src.trainers import compile_utils
from keras.src.trainers import trainer as trainers

from tfmix._keras import layers

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


def build_before_tracing(
    model: keras.Model, original: Callable, **batch: Any
) -> None:
    """Builds a model before TensorFlow traces its step; wraps Keras's method.

    Float32 master weights start from the weights' values. A first value that is
    read from another variable would become part of the step, which XLA refuses,
    and loops may run before it.
    """
    original(**batch)
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
