"""Compares training with 8-bit optimizer state and with float32 state.

    python -m benchmarks.low_memory            # all of it, five seeds
    python -m benchmarks.low_memory --seeds 2 --part digits

The tasks are digits (scikit-learn) and the language of a text by a small
transformer (Django's catalogues), accuracy in percent. All state is in 8 bits,
also that of small variables and of embeddings, which are float32 by default.
Then follows the time of Adam's step under XLA.
"""

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
from absl import flags

import tfmix
from benchmarks import digits, languages, overhead, pairs, results

OPTIMIZERS: dict[str, Callable[[float], Any]] = {
    "Adam": keras.optimizers.Adam,
    "AdamW": keras.optimizers.AdamW,
    # Lion usually takes a third of Adam's rate, and SGD ten times it.
    "Lion": lambda rate: keras.optimizers.Lion(rate / 3),
    "SGD, momentum": lambda rate: keras.optimizers.SGD(
        10 * rate, momentum=0.9, clipnorm=1.0
    ),
}
STATES: dict[str, Callable[[Any], Any]] = {
    "state in float32": lambda optimizer: optimizer,
    "state in 8 bits": lambda optimizer: tfmix.optimizers.LowMemoryOptimizer(
        optimizer, [("", "int8")], seed=1
    ),
}
# The values are a table's title, a learning rate, and a function that trains.
TASKS: dict[str, tuple[str, float, Callable[[Any, int], float]]] = {
    "digits": (
        "Digits, accuracy in %",
        1e-3,
        lambda optimizer, seed: digits.train(optimizer, seed)[1],
    ),
    "transformer": (
        "Language of a text, accuracy in %",
        languages.RATE,
        languages.train,
    ),
}


def measure(task: str, seeds: int) -> results.Table:
    """Returns the table of a task."""
    title, rate, train = TASKS[task]
    rows = []
    for name, make in results.track(OPTIMIZERS.items(), title):
        row = {"optimizer": name}
        for state, around in STATES.items():
            scores = [train(around(make(rate)), seed) for seed in range(seeds)]
            row[state] = results.mean(scores)
        rows.append(row)
    return results.Table(title, rows)


# The values are layers, width, and steps in a turn.
_TIMED = {"200 x 256 x 256": (200, 256, 4), "6 x 2048 x 2048": (6, 2048, 2)}
WAYS: dict[str, Callable[[Any], Any]] = {
    "bare": lambda optimizer: optimizer,
    "8 bits": tfmix.optimizers.LowMemoryOptimizer,
}


def _whole_step(way: str, layers: int, width: int) -> Callable[[], Any]:
    """Returns a step of dense layers, forward to update, a batch of 64."""
    stack = [keras.layers.Dense(width, "relu") for _ in range(layers)]
    model = keras.Sequential([keras.Input((width,)), *stack])
    optimizer = WAYS[way](keras.optimizers.Adam())
    model.compile(optimizer, "mse", jit_compile=True)
    x = np.ones((64, width), "float32")
    return lambda: model.train_on_batch(x, x)


def measure_time(runs: int = 40) -> results.Table:
    """Returns the table of Adam's steps under XLA, in alternating turns."""
    makers: dict[str, Callable[..., Callable[[], Any]]] = {
        "optimizer": lambda way, *size: overhead.compiled_step(WAYS[way], size),
        "training step": _whole_step,
    }
    rows = []
    for name, (layers, width, repeats) in results.track(_TIMED.items(), "time"):
        for what, make in makers.items():
            steps = {way: make(way, layers, width) for way in WAYS}
            found = pairs.compared("way", steps, runs, repeats)
            times = {f"{row['way']}, ms": row["ms"] for row in found}
            ratio = found[-1]["ratio"]
            rows.append({"model": name, "timed": what, **times, "ratio": ratio})
    title = "Time of Adam over float32's, under XLA on two CPU cores"
    return results.Table(title, rows)


FLAGS = results.flag_values()
_PARTS = (*TASKS, "time")
flags.DEFINE_integer("seeds", 5, "runs of each task", flag_values=FLAGS)
results.add_names(FLAGS, "part", _PARTS, _PARTS, "what to measure")


def tables() -> Iterator[results.Table]:
    """Measures the chosen parts."""
    for part in FLAGS.part:
        is_time = part == "time"
        yield measure_time() if is_time else measure(part, FLAGS.seeds)


if __name__ == "__main__":
    how = "{seeds} seeds; mean and standard deviation"
    results.run("low_memory", FLAGS, tables, how)
