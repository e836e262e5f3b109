"""What loss scaling costs on a sparse gradient: time and peak memory.

python -m benchmarks.sparse_memory [--json] [--save]

A table of 1,000,000 x 64 floats, 1,024 ids a batch, SGD and Adagrad. The bare
optimizer, Keras's scaler and tfmix's take the same steps.

Time: in one process, each scaler in turn with the bare optimizer. With all
three in turn, the one after Keras's dense check measured 1.99 instead of 1.20.

Peak memory: in a process for each, how far the kernel's peak of the resident
set rises above its size before the first step. The peak is reset first, as the
making of the table would hide the steps; and a table of 1,000 rows takes the
same steps before that, so that what tracing and compiling need is there.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from benchmarks import results

ROWS, WIDTH, IDS = 1_000_000, 64, 1024
WAYS = ("bare", "Keras", "tfmix")
# Adagrad's squares are a dense slot, which takes it 100 times as long.
TIMED = {"SGD": 300, "Adagrad": 15}
_WARM_UP = 3
_MEMORY_STEPS = 30


def make_steps(
    ways: tuple[str, ...], inner: str, num_rows: int = ROWS
) -> dict[str, Callable[[], Any]]:
    """Returns a compiled step on one shared table for each way."""
    import keras
    import tensorflow as tf

    import tfmix

    wrap = {
        "bare": lambda optimizer: optimizer,
        "Keras": keras.optimizers.LossScaleOptimizer,
        "tfmix": tfmix.LossScaleOptimizer,
    }
    # Ones, since untouched zeros are no resident memory.
    table = keras.Variable(tf.ones((num_rows, WIDTH)), name="table")
    ids = tf.constant(keras.random.randint((IDS,), 0, num_rows, seed=1))
    values = keras.random.normal((IDS, WIDTH), seed=2)
    shape = tf.constant((num_rows, WIDTH))

    def compiled(way: str) -> Callable[[], Any]:
        optimizer = wrap[way](getattr(keras.optimizers, inner)(0.01))
        optimizer.build([table])

        @tf.function
        def step(values: Any, ids: Any) -> None:
            scaled = values if way == "bare" else optimizer.scale_loss(values)
            slices = tf.IndexedSlices(scaled, ids, shape)
            optimizer.apply([slices], [table])

        return lambda: step(values, ids)

    return {way: compiled(way) for way in ways}


def times(ways: tuple[str, str], inner: str) -> dict[str, list[float]]:
    """Returns milliseconds per step; the two ways take turns."""
    steps = make_steps(ways, inner)
    result: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(_WARM_UP + TIMED[inner]):
        for way in ways:
            start = time.perf_counter()
            steps[way]()
            if turn >= _WARM_UP:
                elapsed = 1000 * (time.perf_counter() - start)
                result[way].append(elapsed)
    return result


def peak_mb(way: str, inner: str) -> float:
    """Returns how far the resident set rises while steps of one way run."""
    (small_step,) = make_steps((way,), inner, num_rows=1000).values()
    for _ in range(_MEMORY_STEPS):
        small_step()
    (step,) = make_steps((way,), inner).values()
    before = _status_mb("VmRSS")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    for _ in range(_MEMORY_STEPS):
        step()
    return _status_mb("VmHWM") - before


def peak_mb_in_own_process(way: str, inner: str) -> float:
    """Returns `peak_mb` of a fresh process."""
    command = [sys.executable, "-m", "benchmarks.sparse_memory"]
    result = subprocess.run(
        [*command, "--peak", way, inner],
        capture_output=True,
        text=True,
        check=True,
    )
    return float(result.stdout.split()[-1])


def _status_mb(field: str) -> float:
    with open("/proc/self/status") as file:
        (line,) = (line for line in file if line.startswith(field + ":"))
    return int(line.split()[1]) / 1024


def rows(inner: str) -> list[dict[str, Any]]:
    """Measures all around one optimizer; returns a row per way."""
    pairs = {way: times(("bare", way), inner) for way in WAYS[1:]}
    pairs["bare"] = pairs["tfmix"]
    return [_row(way, pairs[way], inner) for way in WAYS]


def _row(way: str, pair: dict[str, list[float]], inner: str) -> dict[str, Any]:
    low, median, high = statistics.quantiles(pair[way], n=4)
    return {
        "optimizer": way,
        "median_ms": median,
        "quartiles_ms": [low, high],
        "ratio": median / statistics.median(pair["bare"]),
        "peak_mb": peak_mb_in_own_process(way, inner),
    }


def table(inner: str, rows: list[dict[str, Any]]) -> results.Table:
    """Returns the rows as a table."""
    shown = [
        {
            "optimizer": row["optimizer"],
            "ms (median)": row["median_ms"],
            "quartiles": "{:.3f} to {:.3f}".format(*row["quartiles_ms"]),
            "ratio to bare": row["ratio"],
            "peak memory, MB": row["peak_mb"],
        }
        for row in rows
    ]
    title = f"{inner} on {IDS} rows of a {ROWS:,} x {WIDTH} table"
    note = f"Median of {TIMED[inner]} steps, in turns with the bare optimizer."
    return results.Table(title, shown, note)


def main(arguments: list[str] | None = None) -> int:
    """Parses, measures, prints; 1 if tfmix costs more than it may."""
    words = sys.argv[1:] if arguments is None else arguments
    parser = results.parser("sparse_memory", __doc__)
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.peak:
        print(peak_mb(*options.peak))
        return 0
    how = "seeds 1 and 2; peak of the resident set in a process of its own"
    run = results.Run("sparse_memory", words, "tensorflow", how)
    found = {inner: rows(inner) for inner in TIMED}
    shown = [table(inner, rows) for inner, rows in found.items()]
    results.publish(run.record(shown), options)
    return int(any(_is_too_much(rows) for rows in found.values()))


def _is_too_much(rows: list[dict[str, Any]]) -> bool:
    bare, ours = rows[0], rows[-1]
    return ours["ratio"] > 1.5 or ours["peak_mb"] - bare["peak_mb"] > 5.0


if __name__ == "__main__":
    sys.exit(main())
