"""Compares how runs survive faults under Keras's loss scaler and tfmix's.

python -m benchmarks.faults [--only=NAME,...] [--systems=NAME,...] [--json]
                             [--save=docs]

`--systems masters flat split stochastic` shows pure 16-bit variables,
`--systems low stochastic8` shows 8-bit optimizer state. KERAS_BACKEND=jax runs
the rows that do not need `tf.distribute`.

Every outcome is computed from this run. The faults run in child processes, so
one that hangs or kills its process only costs one row.
The exit status is 1 if any system but Keras's does not survive a row.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
from absl import flags, logging
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import results
from benchmarks.fault_cases import catalogue, child, processes, systems
from benchmarks.fault_cases.record import Fault, Outcome

# Each child imports TensorFlow and Keras once.
_IMPORT_SECONDS = 120
_MARKS = {True: "[green]survives[/]", False: "[red]lost[/]"}

Pair = tuple[Fault, systems.System]


def run_all(
    faults: list[Fault],
    columns: Sequence[systems.System],
    report: Callable[[str], None],
) -> dict[tuple[str, str], Outcome]:
    """Runs every fault under every system that it applies to.

    Args:
        faults: The rows.
        columns: The systems.
        report: Called with a line of progress for each outcome.

    Returns:
        Outcomes by fault name and system name.
    """
    todo = [
        (fault, system)
        for fault in faults
        for system in columns
        if fault.name not in system.inapplicable
    ]
    outcomes: dict[tuple[str, str], Outcome] = {}
    while len(outcomes) < len(todo):
        left = [p for p in todo if (p[0].name, p[1].name) not in outcomes]
        for (fault, system), outcome in _run_in_one_child(left):
            outcomes[fault.name, system.name] = outcome
            report(f"{fault.name}, {system.name}: {outcome.text}")
    return outcomes


def _run_in_one_child(pairs: list[Pair]) -> Iterator[tuple[Pair, Outcome]]:
    """Yields outcomes until all are done, or one of them ends the child."""
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
    """Returns the outcome of a fault, and whether the child can continue."""
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
    faults: list[Fault],
    columns: Sequence[systems.System],
    outcomes: dict[tuple[str, str], Outcome],
) -> Table:
    """Returns one row per fault and one column per system."""
    title = "What a fault does to a run"
    result = Table(title=title, box=box.SIMPLE_HEAD, show_lines=True)
    for heading in ("Fault", *(system.name for system in columns)):
        result.add_column(heading, ratio=1, overflow="fold")
    for fault in faults:
        result.add_row(
            f"{fault.title}\n[dim]{fault.name}[/]",
            *(_cell(fault, system, outcomes) for system in columns),
        )
    return result


def _cell(
    fault: Fault,
    system: systems.System,
    outcomes: dict[tuple[str, str], Outcome],
) -> str:
    if fault.name in system.inapplicable:
        return f"does not apply: {system.inapplicable[fault.name]}"
    outcome = outcomes[fault.name, system.name]
    return f"{_MARKS[outcome.survived]}: {_plain(outcome.text)}"


def _plain(text: str) -> str:
    # rich would read "[nan" as the start of a style.
    return text.replace("[", r"\[")


def as_json(
    faults: list[Fault],
    columns: Sequence[systems.System],
    outcomes: dict[tuple[str, str], Outcome],
) -> str:
    """Returns the table as JSON, one object per fault."""
    rows = [
        {"fault": fault.name, "title": fault.title}
        | {
            system.name: vars(outcomes[fault.name, system.name])
            for system in columns
            if (fault.name, system.name) in outcomes
        }
        for fault in faults
    ]
    return json.dumps(rows, indent=2)


def plain_table(
    faults: list[Fault],
    columns: Sequence[systems.System],
    outcomes: dict[tuple[str, str], Outcome],
) -> results.Table:
    """Returns the table for the page, without colours."""

    def cell(fault: Fault, system: systems.System) -> str:
        if fault.name in system.inapplicable:
            return f"does not apply: {system.inapplicable[fault.name]}"
        outcome = outcomes[fault.name, system.name]
        mark = "survives" if outcome.survived else "**lost**"
        return f"{mark}: {outcome.text}"

    rows = [
        {"fault": fault.title}
        | {system.name: cell(fault, system) for system in columns}
        for fault in faults
    ]
    return results.Table(f"{len(faults)} faults", rows)


FLAGS = results.flag_values()
results.add_names(
    FLAGS,
    "systems",
    systems.ALL,
    [each.name for each in systems.SYSTEMS],
    "what to compare",
)
flags.DEFINE_list("only", [], "names of faults", flag_values=FLAGS)


def main(arguments: list[str] | None = None) -> int:
    """Parses, runs, prints; returns the exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    run = results.Run("faults", words, keras.backend.backend())
    results.parse(FLAGS, words)
    faults = [catalogue.by_name(name) for name in FLAGS.only]
    faults = faults or catalogue.on_this_backend()
    start = time.monotonic()

    def report(line: str) -> None:
        logging.info("[%4.0f s] %s", time.monotonic() - start, line)

    columns = [systems.by_name(name) for name in FLAGS.systems]
    outcomes = run_all(faults, columns, report)
    if FLAGS.json:
        print(as_json(faults, columns, outcomes))
    else:
        Console(width=None if sys.stdout.isatty() else 120).print(
            table(faults, columns, outcomes)
        )
    tables = [
        plain_table(faults, columns, outcomes),
        survived_table(columns, outcomes),
    ]
    kept = run.record(tables)
    results.publish(kept, FLAGS, shown=False)
    return _summary(columns, outcomes, report)


def survived_table(
    columns: Sequence[systems.System],
    outcomes: dict[tuple[str, str], Outcome],
) -> results.Table:
    """Returns how many faults each system survives."""
    rows = []
    for system in columns:
        own = [o for (_, name), o in outcomes.items() if name == system.name]
        survived = sum(outcome.survived for outcome in own)
        rows.append(
            {"library": system.name, "faults": len(own), "survived": survived}
        )
    return results.Table("Survived", rows)


def _summary(
    columns: Sequence[systems.System],
    outcomes: dict[tuple[str, str], Outcome],
    report: Callable[[str], None],
) -> int:
    """Reports how many faults each system survives; returns the status."""
    lost = 0
    for system in columns:
        own = [
            c.survived
            for (_, name), c in outcomes.items()
            if name == system.name
        ]
        report(f"{system.name} survives {sum(own)} of {len(own)} faults")
        if isinstance(system, systems.Tfmix):
            lost += own.count(False)
    return int(lost > 0)


if __name__ == "__main__":
    results.start(main, FLAGS)
