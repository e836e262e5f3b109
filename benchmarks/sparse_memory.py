"""Measures the cost of loss scaling for sparse gradients: time and memory.

python -m benchmarks.sparse_memory [--json] [--save=docs]

A table of 1,000,000 x 64 floats is trained with 1,024 ids per batch, by SGD.
The unwrapped optimizer, Keras's scaler and tfmix's run the same steps.

For the time, each scaler takes turns with the unwrapped optimizer in one
process. (With all three in turn, the one after Keras's dense check measured
1.99 instead of 1.20.)

For the peak memory, each runs in its own process, which measures the rise of
the kernel's peak of the resident set above its size before the first step. The
peak is reset first, because creating the table would hide the steps. Before
that, a table of 1,000 rows runs the same steps, so that the memory for tracing
and compilation does not count.
"""

import pathlib
import statistics
from collections.abc import Callable
from typing import Any

import keras
from absl import flags

from benchmarks import answers, overhead, pairs, results

ROWS, WIDTH, IDS = 1_000_000, 64, 1024
WAYS = ("bare", "Keras", "tfmix")
_TIMED_STEPS = 300
_WARM_UP = 3
_MEMORY_STEPS = 30


def make_steps(
    ways: tuple[str, ...], num_rows: int = ROWS
) -> dict[str, Callable[[], Any]]:
    """Returns a compiled step on one shared table for each way."""
    import tensorflow as tf

    # The table holds ones, because untouched zeros need no resident memory.
    table = keras.Variable(tf.ones((num_rows, WIDTH)), name="table")
    ids = tf.constant(keras.random.randint((IDS,), 0, num_rows, seed=1))
    values = keras.random.normal((IDS, WIDTH), seed=2)
    shape = tf.constant((num_rows, WIDTH))

    def compiled(way: str) -> Callable[[], Any]:
        optimizer = overhead.SYSTEMS[way](keras.optimizers.SGD(0.01))
        optimizer.build([table])

        @tf.function
        def step(values: Any, ids: Any) -> None:
            scaled = values if way == "bare" else optimizer.scale_loss(values)
            slices = tf.IndexedSlices(scaled, ids, shape)
            optimizer.apply([slices], [table])

        return lambda: step(values, ids)

    return {way: compiled(way) for way in ways}


def peak_mb(way: str) -> float:
    """Returns the rise of the resident set during steps of one way."""
    (small_step,) = make_steps((way,), num_rows=1000).values()
    for _ in range(_MEMORY_STEPS):
        small_step()
    (step,) = make_steps((way,)).values()
    before = _megabytes("VmRSS")
    # Writing 5 resets the peak to the current size (Linux).
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    for _ in range(_MEMORY_STEPS):
        step()
    return _megabytes("VmHWM") - before


def _megabytes(field: str) -> float:
    (line,) = (
        line
        for line in pathlib.Path("/proc/self/status").read_text().splitlines()
        if line.startswith(f"{field}:")
    )
    return int(line.split()[1]) / 1024


def table() -> results.Table:
    """Measures all ways; returns a row per way."""
    found = {}
    for way in WAYS[1:]:
        steps = make_steps(("bare", way))
        timed = {name: pairs.timed(step) for name, step in steps.items()}
        found[way] = pairs.in_turns(timed, _TIMED_STEPS, _WARM_UP)
    found["bare"] = found["tfmix"]
    rows = [
        {
            "optimizer": way,
            "ms": statistics.median(found[way][way]),
            "ratio to bare": statistics.median(found[way][way])
            / statistics.median(found[way]["bare"]),
            "peak memory, MB": answers.answer_of(
                "benchmarks.sparse_memory", "--peak", way
            ),
        }
        for way in WAYS
    ]
    title = f"SGD on {IDS} rows of a {ROWS:,} x {WIDTH} table"
    note = f"Median of {_TIMED_STEPS} steps, in turns with the bare optimizer."
    return results.Table(title, rows, note)


FLAGS = results.flag_values()
flags.DEFINE_enum(
    "peak", None, WAYS, "the part of a process of its own", flag_values=FLAGS
)


def main() -> int:
    """Parses, measures, prints; returns 1 if tfmix costs too much."""
    results.parse(FLAGS)
    if FLAGS.peak:
        answers.answer(peak_mb(FLAGS.peak))
        return 0
    how = "seeds 1 and 2; peak of the resident set in a process of its own"
    (made,) = results.measure("sparse_memory", FLAGS, lambda: [table()], how)
    bare, *_, ours = made.rows
    more = ours["peak memory, MB"] - bare["peak memory, MB"]
    return int(ours["ratio to bare"] > 1.5 or more > 5.0)


if __name__ == "__main__":
    results.start(main, FLAGS)
