"""Measures the overhead of loss scaling in the optimizer's step.

    python -m benchmarks.overhead [--runs 60] [--json] [--save=docs]

The unwrapped optimizer, Keras's scaler and tfmix's take turns in one process.
There are only variables and Adam, so that nothing but the optimizer is timed:
two hundred 32 x 32 layers, six 2048 x 2048 layers; under XLA with TensorFlow,
compiled and with donated state with JAX.
"""

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
from absl import flags

import tfmix
from benchmarks import pairs, results

# The values are layers, width, and steps in a turn. A turn takes a tenth of a
# second, because a shared machine's memory changes its speed every few seconds.
MODELS = {
    "many small (200 x 32 x 32)": (200, 32, 4),
    "few large (6 x 2048 x 2048)": (6, 2048, 1),
}
SYSTEMS: dict[str, Callable[[Any], Any]] = {
    "bare": lambda inner: inner,
    "Keras": keras.optimizers.LossScaleOptimizer,
    "tfmix": tfmix.LossScaleOptimizer,
}
Step = Callable[[], Any]
Wrap = Callable[[Any], Any]


def variables(layers: int, width: int) -> list[Any]:
    """Returns the kernels and biases of some dense layers."""
    shapes = [(width, width), (width,)] * layers
    return [keras.Variable(np.zeros(shape, "float32")) for shape in shapes]


def wrapped(wrap: Wrap, model: list[Any]) -> Any:
    """Returns Adam, wrapped and built."""
    optimizer = wrap(keras.optimizers.Adam())
    optimizer.build(model)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer.scale_loss(1.0)
    return optimizer


def compiled_step(wrap: Wrap, size: tuple[int, int]) -> Step:
    """Returns a step of Adam on variables of a size."""
    if keras.backend.backend() == "jax":
        return _jax_step(wrap, size)
    import tensorflow as tf

    model = variables(*size)
    optimizer = wrapped(wrap, model)
    grads = [tf.fill(v.shape, np.float32(1e-3)) for v in model]

    @tf.function(autograph=False, jit_compile=True)
    def step(grads: list[Any]) -> Any:
        optimizer.apply(grads, model)
        return optimizer.iterations.value

    return lambda: step(grads).numpy()


def _jax_step(wrap: Wrap, size: tuple[int, int]) -> Step:
    """Returns a compiled step that keeps its state between calls."""
    import jax

    model = variables(*size)
    optimizer = wrapped(wrap, model)

    # Inputs and outputs have the same order, so donated inputs are not copied.
    def stateless(state: list[Any], grads: list[Any]) -> list[Any]:
        return list(optimizer.stateless_apply(state[1], grads, state[0]))

    grads = [jax.numpy.full(v.shape, 1e-3) for v in model]
    state = [
        [jax.numpy.array(v.value) for v in each]
        for each in (model, optimizer.variables)
    ]
    lowered = jax.jit(stateless, donate_argnums=0).lower(state, grads)
    compiled = lowered.compile()

    def step() -> None:
        state[:] = compiled(state, grads)
        jax.block_until_ready(state)

    return step


FLAGS = results.flag_values()
flags.DEFINE_integer("runs", 60, "turns of each system", flag_values=FLAGS)


def tables() -> Iterator[results.Table]:
    """Measures all models and systems."""
    rows = []
    for name, (layers, width, repeats) in MODELS.items():
        steps = {
            system: compiled_step(wrap, (layers, width))
            for system, wrap in SYSTEMS.items()
        }
        found = pairs.compared("optimizer", steps, FLAGS.runs, repeats)
        rows += [{"model": name, **row} for row in found]
    is_jax = keras.backend.backend() == "jax"
    yield results.Table("JAX" if is_jax else "TensorFlow, under XLA", rows)


if __name__ == "__main__":
    results.run(
        "overhead", FLAGS, tables, "median and quartiles of {runs} turns"
    )
