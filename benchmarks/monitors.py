"""What the monitors cost: step times with and without, in turns.

Run `python -m benchmarks.monitors`. Runs alternate, so that a machine that
slows down slows both; the table shows the median ratio and its spread.
"""

import os
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

from benchmarks import results
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
    model.fit(
        batches(),
        steps_per_epoch=steps,
        verbose=0,
        callbacks=monitors,
        shuffle=False,
    )
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


def main(arguments: list[str] | None = None) -> None:
    """Measures, prints and, if asked, keeps the table."""
    words = sys.argv[1:] if arguments is None else arguments
    parser = results.parser("monitors", __doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--jit", action="store_true", help="compile with XLA")
    options = parser.parse_args(words)
    run = results.Run(
        "monitors",
        words,
        keras.backend.backend(),
        f"seed 0; {options.rounds} rounds of {options.steps} steps in turns",
    )
    model = build(options.jit)
    rows = []
    for name, monitor in (
        ("none", keras.callbacks.Callback()),
        ("LossScaleMonitor()", callbacks.LossScaleMonitor()),
        ("NumericsMonitor(every=100)", callbacks.NumericsMonitor(100)),
    ):
        found = ratios(model, monitor, options.steps, options.rounds)
        low, middle, high = np.percentile(found, [25, 50, 75])
        rows.append(
            {
                "callback": name,
                "ratio (median)": float(middle),
                "quartiles": f"{low:.3f} to {high:.3f}",
            }
        )
    title = f"Dense network, batch {BATCH}, width {WIDTH}, mixed_float16"
    table = results.Table(title, rows)
    results.publish(run.record([table]), options)


if __name__ == "__main__":
    main()
