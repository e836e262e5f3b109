"""Compares step times with and without the monitors, in turns.

Run `python -m benchmarks.monitors`. Runs alternate, so that a slow machine
slows both; the table shows the median ratio and its spread.
"""

import os
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from absl import flags

from benchmarks import pairs, results
from tfmix import callbacks
from tfmix.loss_scaling import optimizer as scaling

BATCH = 128
WIDTH = 512


def build(jit_compile: bool) -> keras.Model:
    """Builds a network of matrix products in mixed_float16."""
    hidden = [
        keras.layers.Dense(WIDTH, "relu", dtype="mixed_float16")
        for _ in range(4)
    ]
    head = [
        keras.layers.Dense(10, dtype="mixed_float16"),
        keras.layers.Activation("softmax", dtype="float32"),
    ]
    model = keras.Sequential([keras.Input((WIDTH,)), *hidden, *head])
    model.compile(
        scaling.LossScaleOptimizer(keras.optimizers.SGD(1e-3)),
        "sparse_categorical_crossentropy",
        jit_compile=jit_compile,
    )
    return model


def batches(steps: int) -> Any:
    """Returns the same batch `steps` times, from one thread.

    With its own choice of threads on 2 cores, `tf.data` makes some runs twice
    as slow as others, independent of the callbacks.
    """
    import tensorflow as tf

    generator = np.random.default_rng(0)
    x = generator.normal(size=(BATCH, WIDTH)).astype("float32")
    y = generator.integers(0, 10, BATCH)
    options = tf.data.Options()
    options.autotune.enabled = False
    options.threading.private_threadpool_size = 1
    options.threading.max_intra_op_parallelism = 1
    data = tf.data.Dataset.from_tensors((x, y)).repeat(steps)
    return data.with_options(options)


def seconds(model: keras.Model, steps: int, monitors: list[Any]) -> float:
    """Trains for some steps; returns the seconds per step."""
    data = batches(steps)
    start = time.perf_counter()
    model.fit(data, verbose=0, callbacks=monitors)
    return (time.perf_counter() - start) / steps


def ratios(
    model: keras.Model, monitor: Any, steps: int, rounds: int
) -> np.ndarray:
    """Returns step times with the monitor over those without, in turns."""
    times = pairs.in_turns(
        {
            "with": lambda: seconds(model, steps, [monitor]),
            "without": lambda: seconds(model, steps, []),
        },
        rounds,
    )
    return np.array(pairs.ratios(times["with"], times["without"]))


def modes() -> dict[str, bool]:
    """Maps the modes of this backend to `jit_compile`."""
    # Without it, JAX runs op by op, which is too slow for training.
    is_jax = keras.backend.backend() == "jax"
    return {"XLA": True} if is_jax else {"graph": False, "XLA": True}


def rows_of(
    mode: str, jit_compile: bool, steps: int, rounds: int
) -> list[dict[str, object]]:
    """Returns a row for each callback."""
    model = build(jit_compile)
    rows = []
    for name, monitor in (
        ("none", keras.callbacks.Callback()),
        ("LossScaleMonitor()", callbacks.LossScaleMonitor()),
        ("NumericsMonitor(every=100)", callbacks.NumericsMonitor(100)),
    ):
        found = ratios(model, monitor, steps, rounds)
        low, middle, high = np.percentile(found, [25, 50, 75])
        rows.append(
            {
                "mode": mode,
                "callback": name,
                "ratio (median)": float(middle),
                "quartiles": f"{low:.3f} to {high:.3f}",
            }
        )
    return rows


FLAGS = results.flag_values()
# By default, a monitor samples every 100 steps.
flags.DEFINE_integer("steps", 100, "steps of a turn", flag_values=FLAGS)
flags.DEFINE_integer("rounds", 15, "turns of each callback", flag_values=FLAGS)


def table() -> results.Table:
    """Measures every callback in every mode."""
    rows = []
    for mode, jit_compile in results.track(modes().items(), "modes"):
        rows += rows_of(mode, jit_compile, FLAGS.steps, FLAGS.rounds)
    title = f"Dense network, batch {BATCH}, width {WIDTH}, mixed_float16"
    return results.Table(title, rows)


def main() -> None:
    """Measures, prints and saves the table."""
    results.parse(FLAGS)
    how = f"seed 0; {FLAGS.rounds} rounds of {FLAGS.steps} steps in turns"
    results.measure("monitors", FLAGS, lambda: [table()], how)


if __name__ == "__main__":
    results.start(main, FLAGS)
