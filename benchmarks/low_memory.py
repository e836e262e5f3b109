"""Compares training with 8-bit optimizer state and with float32 state.

    python -m benchmarks.low_memory            # all of it, five seeds
    python -m benchmarks.low_memory --seeds 2 --part digits

The tasks are digits (scikit-learn) and the language of a text by a small
transformer (Django's catalogues), accuracy in percent. All state is in 8 bits,
also that of small variables and of embeddings, which are float32 by default.
Then follows the time of Adam's step under XLA.
"""

import dataclasses
import statistics
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from absl import flags

from benchmarks import languages, master, overhead, results
from tfmix.optimizers import low_memory

OPTIMIZERS: dict[str, Callable[[float], Any]] = {
    "Adam": keras.optimizers.Adam,
    "AdamW": keras.optimizers.AdamW,
    # Lion usually takes a third of Adam's rate, and SGD ten times it.
    "Lion": lambda rate: keras.optimizers.Lion(rate / 3),
    "SGD, momentum": lambda rate: keras.optimizers.SGD(
        10 * rate, momentum=0.9, clipnorm=1.0
    ),
}
SLOTS: dict[str, Callable[[Any], Any]] = {
    "float32": lambda optimizer: optimizer,
    "8 bits": lambda optimizer: low_memory.LowMemoryOptimizer(
        optimizer, [("", "int8")], seed=1
    ),
}


@dataclasses.dataclass(frozen=True)
class Task:
    """Data, a function that trains on it, and the score."""

    title: str
    rate: float
    train: Callable[[Any, int], float]


def _fit_digits(optimizer: Any, seed: int) -> float:
    task = master.digits()
    keras.utils.set_random_seed(seed)
    model = task.model("float32")
    model.compile(optimizer, loss="sparse_categorical_crossentropy")
    model.fit(*task.train, batch_size=32, epochs=task.epochs, verbose=0)
    return task.score(model.predict(task.test[0], verbose=0), task.test[1])


def _fit_transformer(optimizer: Any, seed: int) -> float:
    data = languages.texts()
    keras.utils.set_random_seed(seed)
    model = languages.build_model()
    model.compile(
        optimizer,
        loss="sparse_categorical_crossentropy",
        jit_compile=languages.compiled(),
    )
    languages.fit(model, seed)
    predicted = model.predict(data[1], verbose=0).argmax(axis=-1)
    return 100 * float(np.mean(predicted == data[3]))


TASKS = {
    "digits": Task("Digits, accuracy in %", 1e-3, _fit_digits),
    "transformer": Task(
        "Language of a text, accuracy in %", languages.RATE, _fit_transformer
    ),
}


def measure(task: Task, seeds: int) -> results.Table:
    """Returns the table of a task."""
    rows = []
    for name in results.track(OPTIMIZERS, task.title):
        scores = {
            slots: [
                task.train(around(OPTIMIZERS[name](task.rate)), seed)
                for seed in range(seeds)
            ]
            for slots, around in SLOTS.items()
        }
        rows.append(_row(name, scores))
    return results.Table(task.title, rows)


def _row(name: str, scores: dict[str, list[float]]) -> dict[str, Any]:
    mean = {slots: statistics.mean(each) for slots, each in scores.items()}
    noise = {slots: statistics.stdev(each) for slots, each in scores.items()}
    difference = mean["8 bits"] - mean["float32"]
    return {
        "optimizer": name,
        "slots in float32": f"{mean['float32']:.2f} ± {noise['float32']:.2f}",
        "in 8 bits": f"{mean['8 bits']:.2f} ± {noise['8 bits']:.2f}",
        "difference": f"{difference:+.2f}",
        "within 1 x the noise": abs(difference) <= noise["float32"],
    }


# The values are layers, width, and steps in a turn.
_TIMED = {"200 x 256 x 256": (200, 256, 4), "6 x 2048 x 2048": (6, 2048, 2)}
_WAYS = ("bare", "8 bits")


def _whole_step(way: str, layers: int, width: int) -> Callable[[], Any]:
    """Returns a step of dense layers, forward to update, a batch of 64."""
    stack = [keras.layers.Dense(width, "relu") for _ in range(layers)]
    model = keras.Sequential([keras.Input((width,)), *stack])
    optimizer = overhead.WAYS[way](keras.optimizers.Adam())
    model.compile(optimizer, "mse", jit_compile=True)
    x = np.ones((64, width), "float32")
    return lambda: model.train_on_batch(x, x)


def measure_time(runs: int = 40) -> results.Table:
    """Returns the table of Adam's steps under XLA, in alternating turns."""
    rows = []
    for name, (layers, width, repeats) in results.track(_TIMED.items(), "time"):
        steps = {
            "optimizer": lambda way, *size: overhead.compiled_step(way, size),
            "training step": _whole_step,
        }
        for what, make in steps.items():
            made = {way: make(way, layers, width) for way in _WAYS}
            found = overhead.in_turns({}, made, repeats, runs)
            rows.append(
                {"model": name, "timed": what}
                | {f"{row['system']}, ms": row["ms"] for row in found}
                | {"ratio": found[-1]["ratio"]}
            )
    return results.Table("Adam's steps under XLA on this CPU", rows)


FLAGS = results.flag_values()
_PARTS = (*TASKS, "time")
flags.DEFINE_integer("seeds", 5, "runs of each task", flag_values=FLAGS)
results.add_names(FLAGS, "part", _PARTS, _PARTS, "what to measure")


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark of the command line."""
    words = sys.argv[1:] if arguments is None else arguments
    results.parse(FLAGS, words)
    run = results.Run(
        "low_memory",
        words,
        keras.backend.backend(),
        f"seeds 0 to {FLAGS.seeds - 1}; mean and standard deviation",
    )
    tables = [
        measure(task, FLAGS.seeds)
        for name, task in TASKS.items()
        if name in FLAGS.part
    ]
    if "time" in FLAGS.part:
        tables.append(measure_time())
    results.publish(run.record(tables), FLAGS)
    return 0


if __name__ == "__main__":
    results.start(main, FLAGS)
