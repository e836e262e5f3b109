"""What the monitors cost: step times with and without, in turns.

Run `python -m benchmarks.monitors`. Runs alternate, so that a machine that
slows down slows both; the table shows the median ratio and its spread.
"""

import argparse
import time

import keras
import numpy as np
import rich.console
import rich.table

from tfmix import callbacks
from tfmix.scaling import optimizer as scaling

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


def seconds(model: keras.Model, steps: int, monitors: list[object]) -> float:
    """Trains for some steps and returns the seconds of one."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(BATCH, WIDTH)).astype("float32")
    y = generator.integers(0, 10, BATCH)

    def batches():
        for _ in range(steps):
            yield x, y

    start = time.perf_counter()
    model.fit(batches(), steps_per_epoch=steps, verbose=0, callbacks=monitors)
    return (time.perf_counter() - start) / steps


def ratios(
    model: keras.Model, monitor: object, steps: int, rounds: int
) -> np.ndarray:
    """Returns step times with the monitor over those without, in turns."""
    for warm in ([], [monitor]):
        seconds(model, steps, list(warm))
    pairs = [
        (seconds(model, steps, [monitor]), seconds(model, steps, []))
        for _ in range(rounds)
    ]
    return np.array([with_it / without for with_it, without in pairs])


def main() -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--jit", action="store_true", help="compile with XLA")
    options = parser.parse_args()
    model = build(options.jit)
    table = rich.table.Table("callback", "ratio", "from", "to")
    for name, monitor in (
        ("none", keras.callbacks.Callback()),
        ("LossScaleMonitor()", callbacks.LossScaleMonitor()),
        ("NumericsMonitor(every=100)", callbacks.NumericsMonitor(100)),
    ):
        found = ratios(model, monitor, options.steps, options.rounds)
        low, middle, high = np.percentile(found, [25, 50, 75])
        table.add_row(name, f"{middle:.3f}", f"{low:.3f}", f"{high:.3f}")
    rich.console.Console().print(table)


if __name__ == "__main__":
    main()
