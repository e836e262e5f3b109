"""A model's training step, handed to the compiler of another machine."""

import contextlib
import functools
import re
from collections.abc import Callable
from typing import Any

import keras
from keras import tree

from tfmix._keras import compilation, training
from tfmix._keras import layers as host
from tfmix.hardware import compilers, model_batches

_MARK = "tfmix_layer_"


def compile_training_step(
    model: keras.Model, batch_size: int, devices: list[Any]
) -> compilers.Compiled:
    """Compiles what `fit` runs for each batch, the guard included.

    Args:
        model: A compiled model, which gets an optimizer's variables.
        batch_size: Rows of a batch, of all devices together.
        devices: Records of JAX, as `compilers.devices` gives them.
    """
    (x,) = model_batches.inputs(model, batch_size)
    outputs = host.run_on_shapes(model, [x])
    y = model_batches.targets(model, outputs)
    data = keras.utils.pack_x_y_sample_weight(x, y)
    try:
        return _compiled(model, data, devices)
    except Exception:
        if y is not None or not training.has_own_step(model):
            raise
        # A step of the user's may compare with targets by itself.
        return _compiled(model, (x, outputs), devices)


def _compiled(
    model: keras.Model, data: Any, devices: list[Any]
) -> compilers.Compiled:
    training.build_for_training(model, data)
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    by_jax = keras.backend.backend() == "jax"
    compiled = _by_jax if by_jax else _by_tensorflow
    layers = host.called(model)
    marked = functools.partial(_marked, layers)
    with host.calls_replaced(layers, marked):
        return compiled(model, data, devices)


def layer_of(label: str) -> int | None:
    """Returns which of `called` layers a product is from, by its label."""
    # A framework's own name scopes count layers of one name in their way.
    indices = re.findall(rf"{_MARK}(\d+)", label)
    return int(indices[-1]) if indices else None


def _marked(layers: list, index: int, original: Callable) -> Callable:
    """Returns a layer's `call`, in a name scope of its own."""
    # TensorFlow's Keras makes a grouped convolution in a function of its own,
    # whose gradients would be outside of the scope.
    inlined: Callable[[], Any] = contextlib.nullcontext
    if hasattr(layers[index], "groups"):
        inlined = compilation.nothing_traced

    def call(*args: Any, **kwargs: Any) -> Any:
        with _scope(f"{_MARK}{index}"), inlined():
            return original(*args, **kwargs)

    return call


def _scope(name: str) -> contextlib.AbstractContextManager:
    if keras.backend.backend() == "jax":
        import jax

        return jax.named_scope(name)
    import tensorflow as tf

    return tf.name_scope(name)


def _by_jax(
    model: keras.Model, data: Any, devices: list[Any]
) -> compilers.Compiled:
    import jax
    import numpy as np

    mesh = jax.sharding.Mesh(np.asarray(devices), ("batch",))
    everywhere = jax.sharding.PartitionSpec()
    rows = jax.sharding.PartitionSpec("batch")

    def described(leaf: Any, spec: Any) -> Any:
        placed = jax.sharding.NamedSharding(mesh, spec)
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=placed)

    state = tuple(
        [described(variable, everywhere) for variable in variables]
        for variables in (
            model.trainable_variables,
            model.non_trainable_variables,
            model.optimizer.variables,
            model.metrics_variables,
        )
    )
    batch = tree.map_structure(lambda leaf: described(leaf, rows), data)
    step = jax.jit(model.train_step, donate_argnums=0)
    return compilers.compile_jax(step.lower(state, batch))


def _by_tensorflow(
    model: keras.Model, data: Any, devices: list[Any]
) -> compilers.Compiled:
    import tensorflow as tf

    if len(devices) > 1:
        raise ValueError(
            "Under the TensorFlow backend `devices` must be 1: its replicas "
            "learn of each other only when they run. Received: "
            f"devices={len(devices)}. Give one device's share of the batch, "
            "or set KERAS_BACKEND=jax."
        )
    # TensorFlow compiles for descriptions of tensors, but for no nest of them.
    leaves = [
        tf.TensorSpec(leaf.shape, leaf.dtype) for leaf in tree.flatten(data)
    ]

    @tf.function(jit_compile=True, autograph=False)
    def step(*batch: Any) -> Any:
        return model.train_step(tree.pack_sequence_as(data, list(batch)))

    try:
        return compilers.compile_tensorflow(step, leaves, devices[0])
    except ValueError as error:
        lacking = re.findall(r"(\w+) \(No registered", str(error))
        if not lacking:
            raise
        raise ValueError(
            f"Under TensorFlow XLA does not compile {sorted(set(lacking))}, "
            f"which {model.name!r} runs; `fit` trains it without XLA. Leave "
            "such layers out of the model (those that augment images can work "
            "on the dataset), or set KERAS_BACKEND=jax."
        ) from error
