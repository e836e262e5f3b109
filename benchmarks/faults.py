"""What a fault does to a run under Keras's loss scaler and under tfmix's.

python -m benchmarks.faults [--only NAME ...] [--json]

KERAS_BACKEND=jax runs the rows that need no `tf.distribute`.

Every outcome is computed from what happened in this very run. The faults run
in child processes, so one that hangs or kills its process costs one row.
The exit status is 1 if tfmix does not survive a row.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from rich.console import Console
from rich.table import Table

from benchmarks.fault_cases import catalogue, child, processes, systems
from benchmarks.fault_cases.record import Fault, Outcome

# Python, TensorFlow and Keras are imported once per child.
_IMPORT_SECONDS = 120
_MARKS = {True: "[green]survives[/]", False: "[red]lost[/]"}

Pair = tuple[Fault, systems.System]


def run_all(
    faults: list[Fault], report: Callable[[str], None]
) -> dict[tuple[str, str], Outcome]:
    """Runs every fault under both systems.

    Args:
        faults: The rows.
        report: Called with a line of progress for each outcome.

    Returns:
        Outcomes by fault name and system name.
    """
    todo = [(fault, system) for fault in faults for system in systems.SYSTEMS]
    outcomes: dict[tuple[str, str], Outcome] = {}
    while len(outcomes) < len(todo):
        left = [p for p in todo if (p[0].name, p[1].name) not in outcomes]
        for (fault, system), outcome in _run_in_one_child(left):
            outcomes[fault.name, system.name] = outcome
            report(f"{fault.name}, {system.name}: {outcome.text}")
    return outcomes


def _run_in_one_child(pairs: list[Pair]) -> Iterator[tuple[Pair, Outcome]]:
    """Yields outcomes until all are there, or one of them ends the child."""
    names = [f"{fault.name}:{system.name}" for fault, system in pairs]
    process = processes.Child(child.__name__, names, own_group=True)
    try:
        if "starts" not in _message(process, _IMPORT_SECONDS):
            raise RuntimeError(
                "The child process did not start: try "
                f"`python -m {child.__name__} {names[0]}` by hand."
            )
        for pair in pairs:
            outcome, lives = _outcome(process, pair[0].seconds)
            yield pair, outcome
            if not lives:
                return
    finally:
        process.kill()


def _outcome(process: processes.Child, seconds: int) -> tuple[Outcome, bool]:
    """Returns the outcome of a fault, and whether the child can go on."""
    try:
        message = _message(process, seconds)
        while message.get("starts"):
            message = _message(process, seconds)
    except TimeoutError:
        return Outcome(False, f"hangs (killed after {seconds} s)"), False
    if not message:
        text = f"the process ends with exit code {process.wait()}"
        return Outcome(False, text), False
    return Outcome(message["survived"], message["text"]), True


def _message(process: processes.Child, seconds: float) -> dict[str, Any]:
    """Returns the child's next message; an empty one if it has ended."""
    until = time.monotonic() + seconds
    while True:
        line = process.line(max(until - time.monotonic(), 0.01))
        if line is None:
            return {}
        if line.startswith(child.MARK):
            return json.loads(line.removeprefix(child.MARK))


def table(
    faults: list[Fault], outcomes: dict[tuple[str, str], Outcome]
) -> Table:
    """Returns one row per fault and one column per system."""
    names = [system.name for system in systems.SYSTEMS]
    result = Table(title="What a fault does to a run", show_lines=True)
    for heading in ("Fault", *names):
        result.add_column(heading, ratio=1, overflow="fold")
    for fault in faults:
        cells = [outcomes[fault.name, name] for name in names]
        result.add_row(
            f"{fault.title}\n[dim]{fault.name}[/]",
            *(f"{_MARKS[c.survived]}: {_plain(c.text)}" for c in cells),
        )
    return result


def _plain(text: str) -> str:
    # Rich reads "[nan" as the start of a style.
    return text.replace("[", r"\[")


def as_json(
    faults: list[Fault], outcomes: dict[tuple[str, str], Outcome]
) -> str:
    """Returns the table as JSON, one object per fault."""
    rows = [
        {"fault": fault.name, "title": fault.title}
        | {
            system.name: vars(outcomes[fault.name, system.name])
            for system in systems.SYSTEMS
        }
        for fault in faults
    ]
    return json.dumps(rows, indent=2)


def main(arguments: list[str] | None = None) -> int:
    """Parses, runs, prints; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults")
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    try:
        faults = [catalogue.by_name(name) for name in options.only]
    except ValueError as error:
        parser.error(str(error))
    faults = faults or catalogue.on_this_backend()
    start = time.monotonic()

    def report(line: str) -> None:
        print(f"[{time.monotonic() - start:4.0f} s] {line}", file=sys.stderr)

    outcomes = run_all(faults, report)
    if options.json:
        print(as_json(faults, outcomes))
    else:
        Console(width=None if sys.stdout.isatty() else 120).print(
            table(faults, outcomes)
        )
    survived = {
        system.name: sum(outcomes[f.name, system.name].survived for f in faults)
        for system in systems.SYSTEMS
    }
    report(f"{len(faults)} faults; survived: {survived}")
    return int(survived["tfmix"] < len(faults))


if __name__ == "__main__":
    sys.exit(main())
