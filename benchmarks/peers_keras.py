"""A worker of `benchmarks.peers`: Adam under Keras, bare and scaled."""

import functools
import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

import tfmix
from benchmarks import turns

SYSTEMS: dict[str, Callable] = {
    "bare": lambda inner: inner,
    "Keras's LossScaleOptimizer": keras.optimizers.LossScaleOptimizer,
    "tfmix": tfmix.LossScaleOptimizer,
}


def milliseconds(
    system: str, layers: int, width: int, repeats: int
) -> float | list[str]:
    """Returns the time of a step; the systems' names if asked for `"?"`."""
    if system == "?":
        return list(SYSTEMS)
    step = prepared(system, layers, width)
    # The first step after the other processes' turns finds cold caches.
    step()
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    return 1e3 * (time.perf_counter() - start) / repeats


# The systems on one model; those on the model before are dropped.
@functools.lru_cache(maxsize=len(SYSTEMS))
def prepared(system: str, layers: int, width: int) -> Callable[[], Any]:
    """Returns a warm step that waits for its result."""
    shapes = [(width, width), (width,)] * layers
    variables = [keras.Variable(np.zeros(shape, "float32")) for shape in shapes]
    optimizer = SYSTEMS[system](keras.optimizers.Adam())
    optimizer.build(variables)
    optimizer.scale_loss(1.0)
    grads = [keras.ops.full(shape, 1e-3) for shape in shapes]
    make = {"tensorflow": _tensorflow, "jax": _jax}[keras.backend.backend()]
    step = make(optimizer, variables, grads)
    for _ in range(3):
        step()
    return step


def _tensorflow(
    optimizer: Any, variables: list[Any], grads: list[Any]
) -> Callable[[], Any]:
    import tensorflow as tf

    @tf.function(autograph=False)
    def step() -> Any:
        optimizer.apply(grads, variables)
        return tf.convert_to_tensor(optimizer.iterations.value)

    return lambda: step().numpy()


def _jax(
    optimizer: Any, variables: list[Any], grads: list[Any]
) -> Callable[[], Any]:
    import jax

    compiled = jax.jit(optimizer.stateless_apply, donate_argnums=(0, 2))
    state = [
        [jax.numpy.array(v.value) for v in optimizer.variables],
        [jax.numpy.array(v.value) for v in variables],
    ]

    def step() -> None:
        model, own = compiled(state[0], grads, state[1])
        state[:] = [own, model]
        jax.block_until_ready(state)

    return step


if __name__ == "__main__":
    turns.serve(milliseconds)
