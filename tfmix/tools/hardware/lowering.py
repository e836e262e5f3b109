"""Lowers a model's training step for the compiler of another device."""

import functools
import re
from collections.abc import Callable
from typing import Any

import keras
from keras import tree

from tfmix._keras import graphs, training
from tfmix._keras import layers as host
from tfmix.tools.hardware import compilers, model_batches

_MARK = "tfmix_layer_"


def _compile_step(
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


def compile_training_step(
    model: keras.Model,
    batch_size: int,
    device: Any,
    compile_step: Callable[..., compilers.Compiled] = _compile_step,
) -> compilers.Compiled:
    """Compiles the step that `fit` runs for each batch, including the guard.

    Args:
        model: A compiled model. Its optimizer is built.
        batch_size: Rows of a batch.
        device: JAX's record of the device, from `compilers.device`.
        compile_step: Function that compiles the model's step for a batch.
    """
    (x,) = model_batches.inputs(model, batch_size)
    outputs = graphs.run_on_shapes(model, [x])
    y = model_batches.targets(model, outputs)
    data = keras.utils.pack_x_y_sample_weight(x, y)
    try:
        return _compile(model, data, device, compile_step)
    except Exception:
        if y is not None or not host.has_own_step(model):
            raise
        # A custom `train_step` may read targets without a loss of the model.
        return _compile(model, (x, outputs), device, compile_step)


def _compile(
    model: keras.Model, data: Any, device: Any, compile_step: Callable
) -> compilers.Compiled:
    training.build_for_training(model, data)
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    layers = host.called(model)
    mark = functools.partial(_with_scope, layers)
    with graphs.calls_replaced(layers, mark):
        compiled: compilers.Compiled = compile_step(model, data, device)
    return compiled


def layer_of(label: str) -> int | None:
    """Returns the index of the `called` layer that a product is from."""
    # JAX's own scopes do not tell layers of the same name apart.
    indices = re.findall(rf"{_MARK}(\d+)", label)
    return int(indices[-1]) if indices else None


def _with_scope(layers: list, index: int, original: Callable) -> Callable:
    """Returns a layer's `call` with its own name scope."""
    import jax

    def call(*args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(f"{_MARK}{index}"):
            return original(*args, **kwargs)

    return call
