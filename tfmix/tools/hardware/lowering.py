"""Lowers a model's training step for the compiler of another device."""

import contextlib
import functools
import re
from collections.abc import Callable
from typing import Any

import keras
from keras import tree

from tfmix._keras import graphs, tracing, training
from tfmix._keras import layers as host
from tfmix.tools.hardware import compilers, model_batches

_MARK = "tfmix_layer_"


def compile_training_step(
    model: keras.Model, batch_size: int, device: Any
) -> compilers.Compiled:
    """Compiles the step that `fit` runs for each batch, including the guard.

    Args:
        model: A compiled model. Its optimizer is built.
        batch_size: Rows of a batch.
        device: JAX's record of the device, from `compilers.device`.
    """
    (x,) = model_batches.inputs(model, batch_size)
    outputs = graphs.run_on_shapes(model, [x])
    y = model_batches.targets(model, outputs)
    data = keras.utils.pack_x_y_sample_weight(x, y)
    try:
        return _compile(model, data, device)
    except Exception:
        if y is not None or not training.has_own_step(model):
            raise
        # A custom `train_step` may read targets without a loss of the model.
        return _compile(model, (x, outputs), device)


def _compile(model: keras.Model, data: Any, device: Any) -> compilers.Compiled:
    training.build_for_training(model, data)
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    on_jax = keras.backend.backend() == "jax"
    compile_step = _compile_on_jax if on_jax else _compile_on_tensorflow
    layers = host.called(model)
    mark = functools.partial(_with_scope, layers)
    with graphs.calls_replaced(layers, mark):
        return compile_step(model, data, device)


def layer_of(label: str) -> int | None:
    """Returns the index of the `called` layer that a product is from."""
    # Frameworks number layers of the same name differently in their scopes, so
    # tfmix has its own.
    indices = re.findall(rf"{_MARK}(\d+)", label)
    return int(indices[-1]) if indices else None


def _with_scope(layers: list, index: int, original: Callable) -> Callable:
    """Returns a layer's `call` with its own name scope."""
    # On TensorFlow, Keras compiles a grouped convolution as a separate
    # function, whose gradients would be outside of the scope.
    inlined: Callable[[], Any] = contextlib.nullcontext
    if hasattr(layers[index], "groups"):
        inlined = tracing.nothing_traced

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


def _compile_on_jax(
    model: keras.Model, data: Any, device: Any
) -> compilers.Compiled:
    import jax

    sharding = jax.sharding.SingleDeviceSharding(device)

    def describe(leaf: Any) -> Any:
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding)

    state = tuple(
        [describe(variable) for variable in variables]
        for variables in (
            model.trainable_variables,
            model.non_trainable_variables,
            model.optimizer.variables,
            model.metrics_variables,
        )
    )
    batch = tree.map_structure(describe, data)
    step = jax.jit(model.train_step, donate_argnums=0)
    with compilers.traced_for(device):
        lowered = step.lower(state, batch)
    return compilers.compile_jax(lowered)


def _compile_on_tensorflow(
    model: keras.Model, data: Any, device: Any
) -> compilers.Compiled:
    import tensorflow as tf

    # TensorFlow compiles for specs of tensors, but not for nests of specs.
    leaves = [
        tf.TensorSpec(leaf.shape, leaf.dtype) for leaf in tree.flatten(data)
    ]

    @tf.function(jit_compile=True, autograph=False)
    def step(*batch: Any) -> Any:
        return model.train_step(tree.pack_sequence_as(data, list(batch)))

    try:
        return compilers.compile_tensorflow(step, leaves, device)
    except ValueError as error:
        lacking = re.findall(r"(\w+) \(No registered", str(error))
        if not lacking:
            raise
        raise ValueError(
            "Under TensorFlow, XLA cannot compile the ops "
            f"{sorted(set(lacking))} of {model.name!r}; `fit` trains it "
            "without XLA. Remove their layers from the model (apply image "
            "augmentation to the dataset), or set KERAS_BACKEND=jax."
        ) from error
