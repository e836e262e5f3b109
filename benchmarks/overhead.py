"""Measures the overhead of loss scaling in the optimizer's step.

    python -m benchmarks.overhead [--runs 60] [--json] [--save=docs]

The unwrapped optimizer, Keras's scaler and tfmix's take turns in one process. A
ratio or an overhead is taken within a turn, so that a slow moment of the
machine affects all of them. There are only variables and Adam, so that nothing
but the optimizer is timed: two hundred 32 x 32 layers, six 2048 x 2048 layers;
under XLA with TensorFlow, compiled and with donated state with JAX.
"""

import os
import statistics
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

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
SYSTEMS = {
    "bare": lambda inner: inner,
    "keras": keras.optimizers.LossScaleOptimizer,
    "tfmix": tfmix.LossScaleOptimizer,
}
# `benchmarks.low_memory` compares this with the first.
WAYS = SYSTEMS | {"8 bits": tfmix.optimizers.LowMemoryOptimizer}
Step = Callable[[], Any]


def variables(layers: int, width: int) -> list[Any]:
    """Returns the kernels and biases of some dense layers."""
    shapes = [(width, width), (width,)] * layers
    return [keras.Variable(np.zeros(shape, "float32")) for shape in shapes]


def wrapped(system: str, model: list[Any]) -> Any:
    """Returns Adam, wrapped by a system and built."""
    optimizer = WAYS[system](keras.optimizers.Adam())
    optimizer.build(model)
    if system in ("keras", "tfmix"):
        optimizer.scale_loss(1.0)
    return optimizer


def compiled_step(system: str, size: tuple[int, int]) -> Step:
    """Returns a step of Adam on variables of a size."""
    if keras.backend.backend() == "jax":
        return _jax_step(system, size)
    import tensorflow as tf

    model = variables(*size)
    optimizer = wrapped(system, model)
    grads = [tf.fill(v.shape, np.float32(1e-3)) for v in model]

    @tf.function(autograph=False, jit_compile=True)
    def step(grads: list[Any]) -> Any:
        optimizer.apply(grads, model)
        return optimizer.iterations.value

    return lambda: step(grads).numpy()


def _jax_step(system: str, size: tuple[int, int]) -> Step:
    """Returns a compiled step that keeps its state between calls."""
    import jax

    model = variables(*size)
    optimizer = wrapped(system, model)

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


def in_turns(
    what: dict[str, Any], steps: dict[str, Step], repeats: int, runs: int
) -> list[dict[str, Any]]:
    """Times steps in turn; returns rows with ratios within a turn."""
    timed = {name: pairs.timed(step, repeats) for name, step in steps.items()}
    times = pairs.in_turns(timed, runs)
    bare = times["bare"]
    rows = []
    for system, own in times.items():
        extra = pairs.differences(own, bare)
        measured = {
            "ms": own,
            "ratio": pairs.ratios(own, bare),
            "overhead_ms": extra,
        }
        row = {**what, "system": system}
        for name, values in measured.items():
            row[name] = results.spread(values, quartiles=True)
        if system == "tfmix" and "keras" in times:
            of_keras = pairs.differences(times["keras"], bare)
            keras_extra = statistics.median(of_keras)
            # If this is negative, the machine was too busy to measure it.
            if keras_extra > 0:
                share = statistics.median(extra) / keras_extra
                row["overhead_of_keras"] = share
        rows.append(row)
    return rows


def measure(runs: int) -> list[dict[str, Any]]:
    """Returns a row for each model and system.

    It has `ms`, `ratio` to the unwrapped optimizer and `overhead_ms`. tfmix's
    rows also have `overhead_of_keras`, the ratio of the median overheads.
    """
    rows = []
    for name, (*size, repeats) in MODELS.items():
        steps = {
            system: compiled_step(system, tuple(size)) for system in SYSTEMS
        }
        rows += in_turns({"model": name}, steps, repeats, runs)
    keys = dict.fromkeys(key for row in rows for key in row)
    return [{key: row.get(key, "") for key in keys} for row in rows]


FLAGS = results.flag_values()
flags.DEFINE_integer("runs", 60, "turns of each system", flag_values=FLAGS)


def table() -> results.Table:
    """Measures all models and systems."""
    by = "jax" if keras.backend.backend() == "jax" else "xla"
    return results.Table(f"Overhead: {by}", measure(FLAGS.runs))


def main() -> None:
    """Measures, prints and saves the table."""
    results.parse(FLAGS)
    how = f"median and quartiles of {FLAGS.runs} turns"
    results.measure("overhead", FLAGS, lambda: [table()], how)


if __name__ == "__main__":
    results.start(main, FLAGS)
