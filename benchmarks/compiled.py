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

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import keras
from absl import logging

from benchmarks import compiled_steps, overhead, results
from tfmix.tools.hardware import compilers
from tfmix.tools.hardware import target as targets

Rows = list[dict[str, Any]]


def adam(shapes: list[tuple[int, int]]) -> results.Table:
    """Adam's step under each scaler, on variables of equal shapes."""
    rows: Rows = []
    for way, wrap in overhead.SYSTEMS.items():
        made = compiled_steps.compiled(wrap(keras.optimizers.Adam()), shapes)
        rows.append({"optimizer": way, **compiled_steps.row(made)})
    size = "{} x {}".format(*shapes[0])
    title = f"One Adam step on {len(shapes)} variables of {size}"
    return results.Table(title, rows)


def whole(title: str, target: str) -> results.Table:
    """A transformer's training step under policies and scalers."""
    float16 = [("mixed_float16", way) for way in overhead.SYSTEMS]
    pairs = [("float32", "bare"), ("mixed_bfloat16", "bare")]
    pairs += [("mixed_bfloat16", "Keras"), ("mixed_bfloat16", "tfmix")]
    if targets.find(target).kind == "GPU":
        pairs[1:] = [*float16, ("mixed_bfloat16", "bare")]
    pairs.append(("bfloat16", "tfmix"))
    rows: Rows = []
    for policy, way in pairs:
        step = compiled_steps.transformer(policy, way, target)
        names = {"policy": policy, "optimizer": way}
        rows.append(names | compiled_steps.whole_row(step))
    return results.Table(title, rows)


PARTS: dict[str, Callable[[], results.Table]] = {
    "few-large": lambda: adam(compiled_steps.FEW_LARGE),
    "many-small": lambda: adam(compiled_steps.MANY_SMALL),
    "transformer": lambda: whole(
        "A training step of a transformer with four blocks", "h200"
    ),
    "transformer-v5e": lambda: whole("The same on a v5e", "v5e"),
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
