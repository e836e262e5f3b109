"""Compares step times with and without the monitors, in turns.

python -m benchmarks.monitors [--steps 100] [--rounds 15] [--json] [--save=docs]
"""

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
from absl import flags

import tfmix
from benchmarks import pairs, results

BATCH = 128
WIDTH = 512


def build() -> keras.Model:
    """Builds a network of matrix products in mixed_float16."""
    with tfmix.policy_scope("mixed_float16"):
        hidden = [keras.layers.Dense(WIDTH, "relu") for _ in range(4)]
        head = [keras.layers.Dense(10), tfmix.float32_output("softmax")]
        model = keras.Sequential([keras.Input((WIDTH,)), *hidden, *head])
    model.compile(
        tfmix.LossScaleOptimizer(keras.optimizers.SGD(1e-3)),
        "sparse_categorical_crossentropy",
        jit_compile=True,
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


FLAGS = results.flag_values()
# A monitor samples the first of 100 steps.
flags.DEFINE_integer("steps", 100, "steps of a turn", flag_values=FLAGS)
flags.DEFINE_integer("rounds", 15, "turns of each callback", flag_values=FLAGS)


def tables() -> Iterator[results.Table]:
    """Measures `fit` without a callback, then with each of some."""
    model, data = build(), batches(FLAGS.steps)

    def training(*monitors: Any) -> Callable[[], Any]:
        return lambda: model.fit(data, verbose=0, callbacks=[*monitors])

    steps = {
        "": training(),
        "none": training(keras.callbacks.Callback()),
        "LossScaleMonitor()": training(tfmix.callbacks.LossScaleMonitor()),
        "NumericsMonitor(every=100)": training(
            tfmix.callbacks.NumericsMonitor(100)
        ),
    }
    _, *rows = pairs.compared("callback", steps, FLAGS.rounds)
    title = f"Dense network, batch {BATCH}, width {WIDTH}, mixed_float16"
    yield results.Table(title, rows)


if __name__ == "__main__":
    how = "seed 0; {rounds} rounds of {steps} steps in turns"
    results.run("monitors", FLAGS, tables, how)
