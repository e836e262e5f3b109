"""How Keras trains a model: its step, metrics, callbacks and building."""

import contextlib
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import keras
from keras.src.trainers import trainer as trainers

from tfmix._keras import layers, version

# The class that gives models `compile` and `fit`.
TRAINER: type = getattr(trainers, "BaseTrainer", None) or trainers.Trainer
# Whether a batch is taken before TensorFlow traces the step on it, and so lost
# where that fails.
_TAKES_FIRST = keras.backend.backend() == "tensorflow" and version.numbers(
    keras.__version__
) >= (3, 16)

# What gives variables their first values before a step is made, and what
# TensorFlow's trainer alone calls before that.
BUILD = "_symbolic_build"
BEFORE_TRACING = "_maybe_symbolic_build"


def has_own_step(model: keras.Model) -> bool:
    """Says whether a model's class writes its `train_step` itself."""
    module = type(model).train_step.__module__ or ""
    return module.split(".")[0] != "keras"


def weights_of_own_step(model: keras.Model) -> list[keras.Variable]:
    """Lists weights that a user's own `train_step` may write."""
    return list(model.trainable_variables) if has_own_step(model) else []


def metrics(model: keras.Model) -> list[keras.Metric]:
    """Returns a model's metrics, also those that `compile` has yet to build."""
    given = getattr(model, "_compile_metrics", None)
    if given is None or given.built:
        return list(model.metrics)
    nest = given._user_metrics, given._user_weighted_metrics
    leaves = keras.tree.flatten(nest)
    return [*model.metrics, *filter(_is_metric, leaves)]


def _is_metric(value: Any) -> bool:
    return isinstance(value, keras.Metric)


def model_in_step(callback: keras.callbacks.Callback) -> keras.Model:
    """Returns a callback's model while JAX holds its state in a step."""
    # `callback.model` would bring the state back.
    model: keras.Model = callback._model
    return model


def callbacks(method: Callable, args: tuple, kwargs: dict) -> list:
    """Returns the callbacks among the arguments of `fit` or the like."""
    try:
        bound = inspect.signature(method).bind(*args, **kwargs)
    except TypeError:
        # Not our error to raise: Python's own says it better.
        return []
    given = {**bound.arguments, **kwargs}.get("callbacks")
    nest = getattr(given, "callbacks", given)
    return keras.tree.flatten(nest or [])


def for_two_calls(model: keras.Model, arguments: tuple) -> tuple:
    """Returns a train function's arguments, of which two calls see the same."""
    if not _TAKES_FIRST or model.steps_per_execution > 1:
        return arguments
    (iterator,) = arguments
    return (list(itertools.islice(iterator, 1)) or iterator,)


def build_before_tracing(model: keras.Model, **batch: Any) -> None:
    """Builds a model before TensorFlow traces its step.

    Float32 masters start from what the weights hold. TensorFlow cannot move a
    first value that is read from another variable out of a step: XLA refuses
    what stays in, and loops may run before it.
    """
    if not layers.is_built(model):
        # As under JAX; what cannot be built so is left to the trace.
        with contextlib.suppress(RuntimeError):
            model._symbolic_build(**batch)


def build_for_training(model: keras.Model, data: Any) -> None:
    """Builds what a model trains with: losses, metrics, optimizer.

    `data` are inputs and targets, as symbols.
    """
    # As `fit` does with its first batch.
    model._symbolic_build(data_batch=data)
