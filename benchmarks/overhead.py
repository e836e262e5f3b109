"""What loss scaling adds to an optimizer step: time, operations, tracing.

    python -m benchmarks.overhead [--runs 9] [--json PATH] [--only NAME ...]
                                  [--save]

Two models of variables only, so that nothing but the optimizer is timed: many
small (two hundred 32 x 32 layers) and few large (six 2048 x 2048 layers), with
Adam. The bare optimizer, Keras's scaler and tfmix's take turns in one process;
a ratio is taken within a turn, so that a slow moment of the machine hits all
three alike. Under TensorFlow in graph mode and with XLA, under JAX compiled.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import rich.console
import rich.progress
import rich.table

import tfmix
from benchmarks import results as kept

BACKEND = keras.backend.backend()
MODES = {"tensorflow": ("graph", "xla"), "jax": ("jit",)}[BACKEND]
MODELS = {
    "many small (200 x 32 x 32)": (200, 32, 20),
    "few large (6 x 2048 x 2048)": (6, 2048, 1),
}
SYSTEMS = {
    "bare": lambda inner: inner,
    "keras": keras.optimizers.LossScaleOptimizer,
    "tfmix": tfmix.LossScaleOptimizer,
}


def variables(layers: int, width: int) -> list[Any]:
    """Kernels and biases of that many dense layers."""
    shapes = [(width, width), (width,)] * layers
    return [keras.Variable(np.zeros(shape, "float32")) for shape in shapes]


def tensorflow_step(optimizer: Any, model: list[Any], mode: str) -> Callable:
    """Returns a step and traces nothing yet."""
    import tensorflow as tf

    grads = [tf.fill(v.shape, np.float32(1e-3)) for v in model]

    @tf.function(autograph=False, jit_compile=mode == "xla")
    def step(grads: list[Any]) -> Any:
        optimizer.apply(grads, model)
        return optimizer.iterations.value

    return lambda: step(grads).numpy()


def jax_step(optimizer: Any, model: list[Any], mode: str) -> Callable:
    """Returns a compiled step that keeps its state between calls."""
    import jax

    del mode  # There is one.
    grads = [jax.numpy.full(v.shape, 1e-3) for v in model]
    compiled = jax.jit(optimizer.stateless_apply, donate_argnums=(0, 2))
    state = [
        [jax.numpy.array(v.value) for v in optimizer.variables],
        [jax.numpy.array(v.value) for v in model],
    ]

    def step() -> None:
        new_model, new_optimizer = compiled(state[0], grads, state[1])
        state[:] = [new_optimizer, new_model]
        jax.block_until_ready(state)

    return step


def prepared(system: str, layers: int, width: int, mode: str) -> Any:
    """Returns a warm step and the seconds that its first call took."""
    model = variables(layers, width)
    optimizer = SYSTEMS[system](keras.optimizers.Adam())
    optimizer.build(model)
    if system != "bare":
        optimizer.scale_loss(1.0)
    make = tensorflow_step if BACKEND == "tensorflow" else jax_step
    step = make(optimizer, model, mode)
    start = time.perf_counter()
    step()
    first = time.perf_counter() - start
    step()
    return step, first


def seconds(step: Callable, repeats: int) -> float:
    """Seconds a step takes, averaged over a few."""
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    return (time.perf_counter() - start) / repeats


def spread(values: list[float]) -> dict[str, float]:
    """Median, smallest and largest."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
    }


def measure(name: str, mode: str, runs: int) -> dict[str, Any]:
    """Times the three systems in turn on one model in one mode."""
    layers, width, repeats = MODELS[name]
    made = {s: prepared(s, layers, width, mode) for s in SYSTEMS}
    times: dict[str, list[float]] = {system: [] for system in SYSTEMS}
    for _ in range(runs):
        for system, (step, _) in made.items():
            times[system].append(seconds(step, repeats))
    result: dict[str, Any] = {"model": name, "mode": mode, "runs": runs}
    for system, (_, first) in made.items():
        ratios = [
            own / bare
            for own, bare in zip(times[system], times["bare"], strict=True)
        ]
        result[system] = {
            "ms": spread([1e3 * value for value in times[system]]),
            "ratio": spread(ratios),
            "first_call_s": first,
        }
    return result


def table(results: list[dict[str, Any]]) -> rich.table.Table:
    """One row for each model, mode and system."""
    shown = rich.table.Table(title=f"Adam step, {BACKEND} on a CPU")
    for column in ("model", "mode", "system", "ms", "ratio to bare", "first s"):
        shown.add_column(column, justify="left")
    for result in results:
        for system in SYSTEMS:
            row, ratio = result[system], result[system]["ratio"]
            shown.add_row(
                result["model"],
                result["mode"],
                system,
                f"{row['ms']['median']:.2f}",
                f"{ratio['median']:.2f} ({ratio['min']:.2f}-"
                f"{ratio['max']:.2f})",
                f"{row['first_call_s']:.1f}",
            )
    return shown


def page_table(results: list[dict[str, Any]]) -> kept.Table:
    """The same rows for the page."""
    rows = [
        {
            "model": result["model"],
            "mode": result["mode"],
            "system": system,
            "ms": _cell(result[system]["ms"]),
            "ratio to bare": _cell(result[system]["ratio"]),
            "first call, s": result[system]["first_call_s"],
        }
        for result in results
        for system in SYSTEMS
    ]
    return kept.Table(f"Adam step, {BACKEND}", rows)


def _cell(values: dict[str, float]) -> dict[str, float]:
    low, high = values["min"], values["max"]
    return {"median": values["median"], "low": low, "high": high}


def main() -> None:
    """Measures, prints the table and writes it as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--only", nargs="*", choices=MODES, default=MODES)
    parser.add_argument("--json", help="write the figures to this file")
    kept.add_save(parser)
    arguments = parser.parse_args()
    how = f"no randomness; median and extremes of {arguments.runs} turns"
    run = kept.Run("overhead", sys.argv[1:], BACKEND, how)
    cases = [(name, mode) for mode in arguments.only for name in MODELS]
    results = [
        measure(name, mode, arguments.runs)
        for name, mode in rich.progress.track(cases, "measuring")
    ]
    rich.console.Console(width=100).print(table(results))
    kept.publish(run.record([page_table(results)]), arguments, shown=False)
    if arguments.json:
        machine = {
            "cpus": os.cpu_count(),
            "machine": platform.machine(),
            "python": platform.python_version(),
            "keras": keras.__version__,
            "backend": BACKEND,
        }
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"machine": machine, "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
