"""Measures the overhead of loss scaling: time, first step, memory.

    python -m benchmarks.overhead [--only SECTION,...] [--runs 60]
                                  [--keras_compile] [--json] [--save=docs]

The unwrapped optimizer, Keras's scaler and tfmix's take turns in one process. A
ratio or an overhead is taken within a turn, so that a slow moment of the
machine affects all of them. The sections run in separate processes:

graph, xla, jax  Variables only and Adam, so that nothing but the optimizer is
                 timed: two hundred 32 x 32 layers, six 2048 x 2048 layers.
training         Whole steps of dense layers in graph mode, a batch of 64.
mirrored         As `graph` on two replicas, which share the CPU.
compile          Seconds to the first step of 100 and of 300 dense layers,
                 forward, backward and update, under XLA.
sparse           A step of a model with an embedding of 1,000,000 x 64.
memory           Peak of a step above the memory before it.
tracing, jax_tracing
                 Building a model of 100 dense layers and one of 8 blocks of a
                 transformer, and tracing loss and gradient, with and without
                 the layers' fallback to float32.
"""

import os
import sys
from collections.abc import Sequence
from typing import Any

from absl import flags

from benchmarks import answers, pairs, results

_TENSORFLOW = (
    "graph",
    "xla",
    "training",
    "compile",
    "sparse",
    "mirrored",
    "memory",
    "tracing",
)
_JAX = ("jax", "jax_tracing")
SECTIONS = (*_TENSORFLOW, *_JAX)
_LAYERS = (100, 300)
_SYSTEMS = ("bare", "keras", "tfmix")
# Each takes half a minute at 300 layers.
_COMPILATIONS = 3
# Memory depends on TensorFlow's threads, so it is measured several times there.
_MEMORY = (
    ("graph", "tensorflow", 5),
    ("xla", "tensorflow", 3),
    ("jax", "jax", 1),
)


def measure(
    sections: Sequence[str] = SECTIONS,
    runs: int = 60,
    keras_compile: bool = False,
) -> list[dict[str, Any]]:
    """Measures the sections.

    Args:
        sections: Names out of `SECTIONS`.
        runs: Integer, turns of each timing.
        keras_compile: Whether to compile with Keras's scaler as well, which
            takes minutes for 300 layers.

    Returns:
        Rows with `section`, `model` and `system`. Timings have `ms`, `ratio`
        to the unwrapped optimizer and `overhead_ms`, each with `median`,
        `low`, `high` and `runs`. tfmix's rows also have `overhead_of_keras`,
        the ratio of the median overheads. `compile` has `seconds` and
        `ratio`, and `memory` has `mb`, as spreads of fewer runs.
    """
    rows = []
    for section in results.track(sections, "measuring"):
        if section == "compile":
            found = _compile(keras_compile)
        elif section == "memory":
            found = _memory()
        else:
            found = _worker(section, str(runs))
        rows += [{"section": section, **row} for row in found]
    return rows


def _worker(name: str, *arguments: str, backend: str = "") -> Any:
    backend = backend or ("jax" if name in _JAX else "tensorflow")
    return answers.answer_of(
        "benchmarks.overhead_steps",
        name,
        *arguments,
        environment={"KERAS_BACKEND": backend},
    )


def _compile(with_keras: bool) -> list[dict[str, Any]]:
    systems = _SYSTEMS if with_keras else ("bare", "tfmix")
    rows = []
    for layers in _LAYERS:
        found: dict[str, list[float]] = {system: [] for system in systems}
        for _ in range(_COMPILATIONS):
            for system in systems:
                (row,) = _worker("first_step", system, str(layers))
                found[system].append(row["seconds"])
        for system, own in found.items():
            ratios = pairs.ratios(own, found["bare"])
            row = {"model": f"{layers} dense layers", "system": system}
            row |= {"seconds": results.spread(own)}
            rows.append({**row, "ratio": results.spread(ratios)})
    return rows


def _memory() -> list[dict[str, Any]]:
    rows = []
    for mode, backend, runs in _MEMORY:
        for system in _SYSTEMS:
            found = [
                row["mb"]
                for _ in range(runs)
                for row in _worker("peak", system, mode, backend=backend)
            ]
            rows.append(
                {"model": mode, "system": system, "mb": results.spread(found)}
            )
    return rows


def tables(rows: Sequence[dict[str, Any]]) -> list[results.Table]:
    """Returns a table for each section."""
    made = []
    for section in dict.fromkeys(row["section"] for row in rows):
        own = [row for row in rows if row["section"] == section]
        keys = list(dict.fromkeys(key for row in own for key in row))[1:]
        shown = [{key: row.get(key, "") for key in keys} for row in own]
        made.append(results.Table(f"Overhead: {section}", shown))
    return made


FLAGS = results.flag_values()
flags.DEFINE_integer("runs", 60, "turns of each system", flag_values=FLAGS)
# `python -m benchmarks` starts this once for each backend.
results.add_names(
    FLAGS,
    "only",
    SECTIONS,
    {"jax": _JAX, "tensorflow": _TENSORFLOW}.get(
        os.environ.get("KERAS_BACKEND", ""), SECTIONS
    ),
    "sections",
)
flags.DEFINE_bool(
    "keras_compile", False, "compile as Keras does", flag_values=FLAGS
)


def main() -> None:
    """Measures, prints and saves the tables."""
    results.parse(FLAGS, sys.argv[1:])
    backend = os.environ.get("KERAS_BACKEND", "")
    how = (
        f"median and quartiles of {FLAGS.runs} turns; of compile (3 runs) "
        "and memory (5 and 3) the extremes"
    )
    run = results.Run("overhead", sys.argv[1:], backend, how)
    rows = measure(FLAGS.only, FLAGS.runs, FLAGS.keras_compile)
    results.publish(run.record(tables(rows)), FLAGS)


if __name__ == "__main__":
    results.start(main, FLAGS)
