"""What loss scaling costs on a sparse gradient: time and peak memory.

python -m benchmarks.sparse_memory [--json]

A table of 1,000,000 x 64 floats, 1,024 ids a batch, plain SGD. The bare
optimizer, Keras's scaler and tfmix's take the same steps.

Time: in one process, each scaler in turn with the bare optimizer. With all
three in turn, the one after Keras's dense check measured 1.99 instead of 1.20.

Peak memory: in a process for each, how far the kernel's peak of the resident
set rises above its size before the first step. The peak is reset first, as the
making of the table would hide the steps; and a table of 1,000 rows takes the
same steps before that, so that what tracing and compiling need is there.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

ROWS, WIDTH, IDS = 1_000_000, 64, 1024
WAYS = ("bare", "Keras", "tfmix")
_WARM_UP, _TIMED = 20, 300
_MEMORY_STEPS = 30


def make_steps(
    ways: tuple[str, ...], num_rows: int = ROWS
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

    def compiled(way: str) -> Callable[[], Any]:
        optimizer = wrap[way](keras.optimizers.SGD(0.01))
        optimizer.build([table])

        @tf.function
        def step(values: Any, ids: Any) -> None:
            scaled = values if way == "bare" else optimizer.scale_loss(values)
            slices = tf.IndexedSlices(scaled, ids, (num_rows, WIDTH))
            optimizer.apply([slices], [table])

        return lambda: step(values, ids)

    return {way: compiled(way) for way in ways}


def times(ways: tuple[str, str]) -> dict[str, list[float]]:
    """Returns milliseconds per step; the two ways take turns."""
    steps = make_steps(ways)
    result: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(_WARM_UP + _TIMED):
        for way in ways:
            start = time.perf_counter()
            steps[way]()
            if turn >= _WARM_UP:
                elapsed = 1000 * (time.perf_counter() - start)
                result[way].append(elapsed)
    return result


def peak_mb(way: str) -> float:
    """Returns how far the resident set rises while steps of one way run."""
    (small_step,) = make_steps((way,), num_rows=1000).values()
    for _ in range(_MEMORY_STEPS):
        small_step()
    (step,) = make_steps((way,)).values()
    before = _status_mb("VmRSS")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    for _ in range(_MEMORY_STEPS):
        step()
    return _status_mb("VmHWM") - before


def peak_mb_in_own_process(way: str) -> float:
    """Returns `peak_mb` of a fresh process."""
    command = [sys.executable, "-m", "benchmarks.sparse_memory"]
    result = subprocess.run(
        [*command, "--peak", way], capture_output=True, text=True, check=True
    )
    return float(result.stdout.split()[-1])


def _status_mb(field: str) -> float:
    with open("/proc/self/status") as file:
        (line,) = (line for line in file if line.startswith(field + ":"))
    return int(line.split()[1]) / 1024


def rows() -> list[dict[str, Any]]:
    """Measures all; returns a row per way."""
    keras_pair, tfmix_pair = times(("bare", "Keras")), times(("bare", "tfmix"))
    return [
        _row("bare", tfmix_pair),
        _row("Keras", keras_pair),
        _row("tfmix", tfmix_pair),
    ]


def _row(way: str, pair: dict[str, list[float]]) -> dict[str, Any]:
    low, median, high = statistics.quantiles(pair[way], n=4)
    return {
        "optimizer": way,
        "median_ms": median,
        "quartiles_ms": [low, high],
        "ratio": median / statistics.median(pair["bare"]),
        "peak_mb": peak_mb_in_own_process(way),
    }


def main(arguments: list[str] | None = None) -> int:
    """Parses, measures, prints; 1 if tfmix costs more than it may."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sparse_memory")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--peak", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.peak:
        print(peak_mb(options.peak))
        return 0
    table = rows()
    if options.json:
        print(json.dumps(table, indent=2))
    else:
        _print(table)
    bare, ours = table[0], table[-1]
    extra = ours["peak_mb"] - bare["peak_mb"]
    return int(ours["ratio"] > 1.5 or extra > 5.0)


def _print(table: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    title = f"SGD on {IDS} rows of a {ROWS:,} x {WIDTH} table"
    shown = Table(title=title)
    headings = ("optimizer", "median", "quartiles", "ratio", "peak memory")
    for heading in headings:
        shown.add_column(heading)
    for row in table:
        low, high = row["quartiles_ms"]
        shown.add_row(
            row["optimizer"],
            f"{row['median_ms']:.3f} ms",
            f"{low:.3f} to {high:.3f} ms",
            f"{row['ratio']:.2f}",
            f"+{row['peak_mb']:.1f} MB",
        )
    Console().print(shown)


if __name__ == "__main__":
    sys.exit(main())
