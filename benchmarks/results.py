"""A benchmark's result: tables on the screen, a JSON file for the page.

A benchmark creates `Table`s and passes them to `publish`. Every cell is text, a
number, or `spread(values)`; screen, page and JSON show the same rows.
"""

import dataclasses
import datetime
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import rich.box
import rich.console
import rich.markup
import rich.progress
import rich.table
from absl import app, flags, logging

from benchmarks import machine, page

DOCS = pathlib.Path(__file__).parents[1] / "docs"
_PIPE_WIDTH = 140


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows under a title.

    Attributes:
        title: The heading of the rows.
        rows: Column to value, the same columns in each.
        note: A sentence below the table.
    """

    title: str
    rows: Sequence[Mapping[str, Any]]
    note: str = ""


class Run:
    """The facts that are needed to repeat a measurement.

    Args:
        name: The benchmark's name, `"gpu/transformer"` for a part with its
            own record.
        arguments: The arguments after `python -m benchmarks.NAME`.
        backend: The Keras backend.
        how: A sentence on seeds, runs and the spread.
    """

    def __init__(
        self, name: str, arguments: Sequence[str], backend: str, how: str = ""
    ) -> None:
        hidden = ("--save", "--json")
        words = [w for w in arguments if w.split("=")[0] not in hidden]
        module = f"benchmarks.{name.split('/')[0]}"
        command = [f"KERAS_BACKEND={backend}", "python", "-m", module, *words]
        self._facts = {
            "name": name,
            "backend": backend,
            "command": " ".join(command),
            "how": how,
            "load": machine.load(),
        }
        self._begun = time.monotonic()

    def record(
        self, tables: Sequence[Table], versions: dict[str, str] | None = None
    ) -> dict[str, Any]:
        """Returns the result as plain JSON values."""
        now = datetime.datetime.now(datetime.UTC)
        return {
            **self._facts,
            "date": now.strftime("%Y-%m-%d %H:%M UTC"),
            "seconds": round(time.monotonic() - self._begun),
            "machine": machine.describe(),
            "versions": machine.versions(versions),
            "tables": [dataclasses.asdict(table) for table in tables],
        }


def spread(
    values: Sequence[float], quartiles: bool = False
) -> dict[str, float]:
    """Returns a cell with the median and the extremes of some runs.

    Args:
        values: A number for each run.
        quartiles: Whether to return the quartiles instead of the extremes,
            which say little about many short runs.

    Example:
        >>> spread([1.0, 4.0, 2.0])
        {'median': 2.0, 'low': 1.0, 'high': 4.0, 'runs': 3}
    """
    low, high = (25, 75) if quartiles else (0, 100)
    return {
        "median": float(np.median(values)),
        "low": float(np.percentile(values, low)),
        "high": float(np.percentile(values, high)),
        "runs": len(values),
    }


def flag_values() -> flags.FlagValues:
    """Returns the flags of every benchmark, to which others can be added."""
    asked = flags.FlagValues()
    flags.DEFINE_bool(
        "json", False, "print JSON instead of tables", flag_values=asked
    )
    flags.DEFINE_string(
        "save",
        None,
        "write the result and its page into this folder: docs, or another",
        flag_values=asked,
    )
    return asked


def add_names(
    asked: flags.FlagValues,
    name: str,
    choices: Iterable[str],
    default: Iterable[str],
    text: str,
) -> None:
    """Adds a flag for some of the `choices`, separated by commas."""
    known = list(choices)
    flags.DEFINE_list(name, list(default), text, flag_values=asked)
    flags.register_validator(
        name,
        lambda names: set(names) <= set(known),
        f"takes some of these, with commas between: {', '.join(known)}",
        flag_values=asked,
    )


def parse(
    asked: flags.FlagValues, words: Sequence[str] | None = None
) -> list[str]:
    """Parses arguments into the flags; returns those that are not flags.

    Args:
        asked: The flags.
        words: The arguments, by default those of the command line.
    """
    words = sys.argv[1:] if words is None else words
    for name in asked:
        asked[name].unparse()
    # `start` has parsed absl's own flags, such as `--verbosity`.
    _, *names = asked(["benchmarks", *words], known_only=True)
    return [name for name in names if not name.startswith("-")]


def start(main: Callable[[], Any], asked: flags.FlagValues) -> None:
    """Runs a benchmark: absl refuses wrong flags, and answers `--help`."""
    flags.FLAGS.append_flag_values(asked)
    # absl's messages show the progress.
    flags.FLAGS.set_default("verbosity", 0)
    app.run(lambda _: main())


def mean(values: Sequence[float]) -> str:
    """Returns a cell with the mean and the standard deviation of some runs."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.2f} ± {deviation:.2f}"


def measure(
    name: str,
    asked: flags.FlagValues,
    tables: Callable[[], Iterable[Table]],
    how: str = "",
    versions: dict[str, str] | None = None,
    words: Sequence[str] | None = None,
) -> list[Table]:
    """Measures, prints and keeps the tables of the command line's benchmark.

    Args:
        name: The benchmark's name.
        asked: The flags, parsed.
        tables: Function that measures.
        how: A sentence on seeds, runs and the spread.
        versions: Versions of further packages.
        words: The arguments, by default those of the command line.
    """
    import keras

    words = sys.argv[1:] if words is None else words
    begun = Run(name, words, keras.backend.backend(), how)
    made = list(tables())
    publish(begun.record(made, versions), asked)
    return made


def run(
    name: str,
    asked: flags.FlagValues,
    tables: Callable[[], Iterable[Table]],
    how: str = "",
) -> None:
    """Runs a benchmark as a command; see `measure`.

    In `how`, `{runs}` stands for the flag of that name.
    """

    def main() -> None:
        parse(asked)
        said = how.format(**asked.flag_values_dict())
        measure(name, asked, tables, said)

    start(main, asked)


def publish(record: dict[str, Any], asked: flags.FlagValues) -> None:
    """Prints a record, from `Run.record`, and keeps it with `--save`."""
    if asked.json:
        print(json.dumps(record, indent=1))
    else:
        show(record)
    if asked.save:
        path = save(record, pathlib.Path(asked.save))
        logging.info("saved: %s", path)


def track(
    steps: Iterable[Any], what: str, count: int | None = None
) -> Iterator[Any]:
    """Yields the steps and shows progress, separate from the output."""
    console = rich.console.Console(stderr=True)
    yield from rich.progress.track(
        steps, what, count, console=console, disable=not console.is_terminal
    )


def show(record: dict[str, Any]) -> None:
    """Prints the tables of a record."""
    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    console = rich.console.Console(width=width)
    for table in record["tables"]:
        if not table["rows"]:
            said = table.get("note") or "nothing to show"
            console.print(f"{table['title']}: {said}", markup=False)
            continue
        drawn = rich.table.Table(
            *table["rows"][0],
            title=rich.markup.escape(table["title"]),
            box=rich.box.SIMPLE_HEAD,
            caption=table["note"] or None,
            caption_justify="left",
        )
        for row in table["rows"]:
            cells = [page.cell(value) for value in row.values()]
            drawn.add_row(*map(rich.markup.escape, cells))
        console.print(drawn)


def save(record: dict[str, Any], docs: pathlib.Path = DOCS) -> pathlib.Path:
    """Writes a record, replaces the last one of its kind, and makes the page.

    Returns:
        The path of the file, `docs/benchmarks/NAME-BACKEND.json`.
    """
    folder = docs / "benchmarks"
    folder.mkdir(parents=True, exist_ok=True)
    name = record["name"].replace("/", "-")
    path = folder / f"{name}-{record['backend']}.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    write_page(docs)
    return path


def saved(docs: pathlib.Path = DOCS) -> list[dict[str, Any]]:
    """Returns the records that were kept, by name."""
    return [
        json.loads(path.read_text(encoding="utf-8"))
        for path in sorted((docs / "benchmarks").glob("*.json"))
    ]


def write_page(docs: pathlib.Path = DOCS) -> pathlib.Path:
    """Writes `docs/benchmarks.md` from all saved records."""
    path = docs / "benchmarks.md"
    path.write_text(page.render(saved(docs)), encoding="utf-8")
    return path
