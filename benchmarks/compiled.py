"""Counts kernels and bytes of steps compiled for other accelerators.

python -m benchmarks.compiled [--part=NAME,...] [--json] [--save=docs]

XLA's compilers for GPUs and TPUs run without a device (the extras `[nvidia]`
and `[tpu]`, or `make targets`). Nothing is timed; the numbers are counted in
the compiled programs.
"""

import multiprocessing
import os
from collections.abc import Callable
from concurrent import futures
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import keras
from absl import logging

from benchmarks import compiled_steps, results
from tfmix.hardware import compilers
from tfmix.hardware import target as targets

MODELS = {
    "6 x 2048 x 2048": compiled_steps.FEW_LARGE,
    "200 x 256 x 256": compiled_steps.MANY_SMALL,
}
ON_JAX = keras.backend.backend() == "jax"
Rows = list[dict[str, Any]]


def steps() -> results.Table:
    """Adam's step under each scaler, on both lists of variables."""
    rows: Rows = []
    for model, shapes in MODELS.items():
        for way, wrap in compiled_steps.WRAPPERS.items():
            optimizer = wrap(keras.optimizers.Adam())
            made = compiled_steps.compiled(optimizer, shapes, "h200")
            names = {"model": model, "optimizer": way}
            rows.append(names | compiled_steps.row(made))
    return results.Table("One Adam step, compiled for h200", rows)


def whole(target: str, devices: int = 1) -> results.Table:
    """A transformer's training step under policies and scalers."""
    float16 = [("mixed_float16", way) for way in compiled_steps.WRAPPERS]
    pairs = [("float32", "bare"), ("mixed_bfloat16", "bare")]
    pairs += [("mixed_bfloat16", "Keras"), ("mixed_bfloat16", "tfmix")]
    if targets.find(target).kind == "GPU":
        pairs[1:] = [*float16, ("mixed_bfloat16", "bare")]
    pairs.append(("bfloat16", "tfmix"))
    rows: Rows = []
    for policy, way in pairs:
        step = compiled_steps.transformer(policy, way, target, devices)
        names = {"policy": policy, "optimizer": way}
        rows.append(names | compiled_steps.whole_row(step))
    many = f"{devices} x " if devices > 1 else ""
    title = f"A transformer's training step, 4 blocks, for {many}{target}"
    return results.Table(title, rows)


PARTS: dict[str, Callable[[], results.Table]] = {
    "h200": steps,
    "transformer": lambda: whole("h200"),
    # Only JAX compiles for several devices.
    "transformer-v5e": lambda: whole("v5e", 4 if ON_JAX else 1),
}


def _table(part: str) -> results.Table:
    return PARTS[part]()


def compilers_there(*names: str) -> bool:
    """Returns whether all compilers are installed; names missing ones."""
    lacking = {
        module
        for name in names
        for module in compilers.missing(targets.find(name))
    }
    if lacking:
        logging.error(
            "nothing compiled: there is no %s. `make targets` makes an "
            "environment with all of them.",
            ", ".join(sorted(lacking)),
        )
    return not lacking


FLAGS = results.flag_values()
results.add_names(FLAGS, "part", PARTS, PARTS, "what to compile")


def tables() -> list[results.Table]:
    """Compiles each part in its own process, as all need too much memory."""
    with futures.ProcessPoolExecutor(
        1, multiprocessing.get_context("spawn"), max_tasks_per_child=1
    ) as pool:
        made = pool.map(_table, FLAGS.part)
        return list(results.track(made, "parts", len(FLAGS.part)))


def main() -> None:
    """Parses, compiles, prints."""
    results.parse(FLAGS)
    if compilers_there("h200", "v5e"):
        results.measure("compiled", FLAGS, tables)


if __name__ == "__main__":
    results.start(main, FLAGS)
