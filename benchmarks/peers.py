"""What loss scaling costs in tfmix, Keras, PyTorch and plain JAX.

    python -m benchmarks.peers [--runs 9] [--torch-python PATH] [--json]
                               [--save]

One process per stack; they take turns, one Adam step after the other on the
same shapes: many small (two hundred 32 x 32 layers) and few large (six 2048 x
2048). PyTorch is no dependency of tfmix: `--torch-python` names a Python that
has it, by default this one. Its rows say so if it has not.
"""

import argparse
import contextlib
import dataclasses
import functools
import os
import subprocess
import sys
from typing import Any

from benchmarks import pairs, results, turns

# Name: layers, width, steps in a turn.
MODELS = {
    "many small (200 x 32 x 32)": (200, 32, 10),
    "few large (6 x 2048 x 2048)": (6, 2048, 2),
}


@dataclasses.dataclass(frozen=True)
class Stack:
    """What a worker measures with.

    Attributes:
        name: As the table has it.
        module: The worker.
        backend: The Keras backend of the worker, if it has one.
    """

    name: str
    module: str
    backend: str = ""


STACKS = (
    Stack("Keras, TensorFlow graph", "benchmarks.peers_keras", "tensorflow"),
    Stack("Keras, JAX", "benchmarks.peers_keras", "jax"),
    Stack("plain JAX", "benchmarks.peers_jax"),
    Stack("PyTorch", "benchmarks.peers_torch"),
)


def has_torch(python: str) -> bool:
    """Says whether a Python can import PyTorch.

    Raises:
        ValueError: If it cannot be run.
    """
    try:
        found = subprocess.run(
            [python, "-c", "import torch"], capture_output=True, check=False
        )
    except OSError as error:
        raise ValueError(
            "`--torch-python` must be a Python that can be run. Received: "
            f"{python!r}: {error}. Leave it out to measure without PyTorch."
        ) from error
    return found.returncode == 0


def start(
    stack: Stack, torch_python: str, stop: contextlib.ExitStack
) -> tuple[turns.Worker, list[str]]:
    """Starts a worker; returns it and its systems' names."""
    is_torch = stack.name == "PyTorch"
    worker = stop.enter_context(
        turns.Worker(
            stack.module,
            python=torch_python if is_torch else sys.executable,
            environment={"KERAS_BACKEND": stack.backend or "jax"},
        )
    )
    return worker, worker.ask(system="?", layers=0, width=0, repeats=0)


def bare_of(system: str) -> str:
    """Returns the system without scaling that one is compared with."""
    return "bare, fused" if system.endswith("fused") else "bare"


def rows_of(stack: str, times: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Returns a row for each system of a stack.

    Args:
        stack: The stack's name.
        times: Milliseconds by system, turn by turn.
    """
    rows = []
    for system, own in times.items():
        bare = times[bare_of(system)]
        scaled = system != bare_of(system)
        added = results.spread(pairs.differences(own, bare))
        ratio = results.spread(pairs.ratios(own, bare))
        rows.append(
            {
                "stack": stack,
                "system": system,
                "ms": results.spread(own),
                "added, ms": added if scaled else None,
                "ratio to its bare": ratio if scaled else None,
            }
        )
    return rows


def missing_row(stack: str, why: str) -> dict[str, Any]:
    """Returns the row of a stack that cannot be measured here."""
    columns = ("ms", "added, ms", "ratio to its bare")
    return {"stack": stack, "system": why} | dict.fromkeys(columns)


def measure(
    workers: dict[str, tuple[turns.Worker, list[str]]], model: str, runs: int
) -> list[dict[str, Any]]:
    """Returns the rows of one model; all systems of all stacks take turns."""
    layers, width, repeats = MODELS[model]
    size = {"layers": layers, "width": width, "repeats": repeats}
    measures = {
        (name, system): functools.partial(worker.ask, system=system, **size)
        for name, (worker, systems) in workers.items()
        for system in systems
    }
    found = pairs.in_turns(measures, runs)
    times: dict[str, dict[str, list[float]]] = {name: {} for name in workers}
    for (name, system), own in found.items():
        times[name][system] = own
    return [row for name in times for row in rows_of(name, times[name])]


def main(arguments: list[str] | None = None) -> None:
    """Measures, prints and, if asked, keeps the tables."""
    words = sys.argv[1:] if arguments is None else arguments
    options = _parse(words)
    how = f"no randomness; median and extremes of {options.runs} turns"
    run = results.Run("peers", words, how=how)
    versions, missing = {}, []
    with contextlib.ExitStack() as stop:
        workers = {}
        for stack in STACKS:
            if stack.name == "PyTorch" and not options.with_torch:
                why = "not installed here: `--torch-python PATH`"
                missing.append(missing_row(stack.name, why))
                continue
            worker, names = start(stack, options.torch_python, stop)
            if stack.name == "PyTorch":
                versions["torch"], *names = names
            workers[stack.name] = worker, names
        tables = [
            results.Table(
                model, measure(workers, model, options.runs) + missing
            )
            for model in MODELS
        ]
    results.publish(run.record(tables, versions), options)


def _parse(words: list[str]) -> argparse.Namespace:
    parser = results.parser("peers", __doc__)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument(
        "--torch-python",
        default=os.environ.get("TORCH_PYTHON", sys.executable),
        metavar="PATH",
        help="a Python that has PyTorch (default: $TORCH_PYTHON, or this one)",
    )
    options = parser.parse_args(words)
    try:
        options.with_torch = has_torch(options.torch_python)
    except ValueError as error:
        parser.error(str(error))
    return options


if __name__ == "__main__":
    main()
