"""What the examples share: flags, data, the comparison with a twin, a table.

An example trains each of its variants from several seeds and sets it beside
its twin, which differs in nothing but the arithmetic. Ask one what it takes
with `--help`; all of them have

    --epochs, --seeds   how long, and how often
    --out               folder for the picture, empty for none
    --quiet             no progress bar
"""

import dataclasses
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import flags
from rich import box, console, table

BAD_FLAGS = 2  # exit code, as of Python's own argparse


@dataclasses.dataclass(frozen=True)
class Run:
    """What one training run came to.

    Attributes:
        variant: Name of the way of training; one row of the table.
        seed: The seed.
        score: Share of the test set that was right, from 0 to 1.
        twin: Name of the variant to compare with; itself for a twin.
        losses: Training loss of each epoch (or step), for the picture.
        columns: Further columns of the table by their headings. Numbers are
            added up over the seeds, other values listed.
        curve: Another number of each step, for the picture's second half.
    """

    variant: str
    seed: int
    score: float
    twin: str = "float32"
    losses: tuple[float, ...] = ()
    columns: dict[str, Any] = dataclasses.field(default_factory=dict)
    curve: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class Outcome:
    """All runs of an example, what it claims, and whether that held.

    Attributes:
        runs: One per variant and seed.
        claims: Sentences, and whether each came true.
        plot: The picture's file, `None` without one.
        unit: What the scores are; the table's heading.
    """

    runs: tuple[Run, ...]
    claims: dict[str, bool]
    plot: str | None = None
    unit: str = "accuracy"

    @property
    def healthy(self) -> bool:
        """Whether every claim came true."""
        return all(self.claims.values())

    def of(self, variant: str) -> list[Run]:
        """Returns the runs of one variant, one per seed."""
        return [run for run in self.runs if run.variant == variant]


def parse(
    argv: Sequence[str] | None, doc: str, **defaults: Any
) -> flags.FlagValues:
    """Reads an example's flags; prints help, or what is wrong, and exits.

    Args:
        argv: The command line, the program's name first; `None` for Python's.
        doc: The example's docstring, for the help.
        **defaults: Further flags: a name and `(default, help)`. A whole
            number must be at least 1.

    Returns:
        The values, as attributes.
    """
    argv = list(sys.argv if argv is None else argv)
    values = flags.FlagValues()
    standard = {
        "seeds": (3, "Runs of each variant."),
        "out": ("out", "Folder for the picture; empty for none."),
        "quiet": (False, "Whether to leave out the progress bar."),
        "help": (False, "Print this and exit."),
    }
    for name, (default, text) in {**standard, **defaults}.items():
        _define(name, default, text, values)
    try:
        rest = values(argv)[1:]
        if rest:
            raise flags.Error(f"Unknown argument {rest[0]!r}.")
    except flags.Error as error:
        print(f"{argv[0]}: {error} Try --help.", file=sys.stderr)
        sys.exit(BAD_FLAGS)
    if values.help:
        print(f"{doc}\n{values.get_help()}")
        sys.exit(0)
    return values


def _define(
    name: str, default: Any, text: str, values: flags.FlagValues
) -> None:
    if isinstance(default, bool):
        flags.DEFINE_boolean(name, default, text, flag_values=values)
    elif isinstance(default, int):
        flags.DEFINE_integer(name, default, text, 1, flag_values=values)
    elif isinstance(default, float):
        flags.DEFINE_float(name, default, text, flag_values=values)
    else:
        flags.DEFINE_string(name, default, text, flag_values=values)


def digits(batch_size: int = 1, images: bool = False) -> tuple[np.ndarray, ...]:
    """Returns scikit-learn's 1,797 scanned digits, three in ten for the test.

    Args:
        batch_size: The training rows are as many as make whole batches: for
            a smaller last one, XLA would compile the step again. Defaults to
            1, all rows.
        images: Whether to give `(8, 8, 1)` images. Defaults to `False`, 64
            numbers a digit.

    Returns:
        Training inputs from 0 to 1, test inputs, and the labels of both.
    """
    from sklearn import datasets, model_selection

    found = datasets.load_digits()
    inputs = (found.data / 16.0).astype("float32")
    if images:
        inputs = inputs.reshape(-1, 8, 8, 1)
    train_x, test_x, train_y, test_y = model_selection.train_test_split(
        inputs,
        found.target.astype("int32"),
        test_size=0.3,
        stratify=found.target,
        random_state=0,
    )
    rows = len(train_x) // batch_size * batch_size
    return train_x[:rows], test_x, train_y[:rows], test_y


def gap(runs: Sequence[Run], variant: str) -> tuple[float, float]:
    """Compares a variant with its twin.

    Returns:
        The mean score less the twin's, and the noise of the seeds: the
        distance from the worst to the best seed, of the one or the other,
        whichever is larger. (Of three seeds it is 1.7 standard deviations on
        average, twice the 0.8 that a difference of two such means has.)
    """
    own = [run for run in runs if run.variant == variant]
    twin = [run.score for run in runs if run.variant == own[0].twin]
    scores = [run.score for run in own]
    noise = max(max(scores) - min(scores), max(twin) - min(twin))
    return float(np.mean(scores) - np.mean(twin)), float(noise)


def close(runs: Sequence[Run], variant: str, least: float = 0.01) -> bool:
    """Says whether a variant is as good as its twin.

    Args:
        runs: All runs.
        variant: The variant's name.
        least: What is no difference whatever the seeds say. Defaults to one
            point in a hundred: three seeds may agree by chance.
    """
    distance, noise = gap(runs, variant)
    return bool(abs(distance) <= max(noise, least))


def sound(runs: Sequence[Run], least: float) -> dict[str, bool]:
    """Returns what every example claims that trains to a goal.

    Args:
        runs: All runs.
        least: The score that each should come to.
    """
    names = dict.fromkeys(r.variant for r in runs if r.twin != r.variant)
    return {
        f"every run comes to {least:.0%} or more": all(
            run.score >= least for run in runs
        ),
        "16 bit is as good as its float32 twin, within the noise of the seeds "
        "or a point": all(close(runs, name) for name in names),
    }


def by_noise(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Sorts variants by whether they differ from their twins by noise only.

    Args:
        runs: All runs.

    Returns:
        Names of variants, of those that have a twin, under `"inside"` and
        `"outside"`, as far as there are any.
    """
    found: dict[str, list[str]] = {}
    for name in dict.fromkeys(r.variant for r in runs if r.twin != r.variant):
        distance, noise = gap(runs, name)
        where = "inside" if abs(distance) <= noise else "outside"
        found.setdefault(where, []).append(name)
    return found


def drawn(outcome: Outcome) -> table.Table:
    """Returns the table, one row per variant, for rich to print.

    Args:
        outcome: The runs, and what their score is.

    Returns:
        For each variant the mean of its score over the seeds and the range,
        the distance to its twin and the noise of the seeds, and the runs'
        own columns.
    """
    names = list(dict.fromkeys(run.variant for run in outcome.runs))
    headings = list(
        dict.fromkeys(key for run in outcome.runs for key in run.columns)
    )
    rows = table.Table(
        *("variant", f"{outcome.unit}\n%, (range)", "to twin\n(noise)"),
        *headings,
        box=box.SIMPLE_HEAD,
    )
    for name in names:
        own = outcome.of(name)
        scores = [run.score for run in own]
        compared = "-"
        if own[0].twin != name:
            distance, noise = gap(outcome.runs, name)
            # `+ 0.0` makes a plain zero of -0.0.
            points = round(100 * distance, 2) + 0.0
            compared = f"{points:+.2f}\n({100 * noise:.2f})"
        rows.add_row(
            name,
            f"{100 * np.mean(scores):.2f}\n"
            f"({100 * min(scores):.1f}-{100 * max(scores):.1f})",
            compared,
            *(_cell([run.columns.get(key) for run in own]) for key in headings),
        )
    for column in rows.columns:
        # Lines may break between words, and nowhere else.
        cells = [str(column.header), *map(str, column.cells)]
        column.min_width = max(map(len, " ".join(cells).split()), default=1)
    return rows


def _cell(values: list[Any]) -> str:
    found = [value for value in values if value is not None]
    if all(isinstance(value, int | float) for value in found):
        return f"{sum(found):,g}" if found else ""
    return "\n".join(sorted({str(value) for value in found}))


def finish(outcome: Outcome) -> int:
    """Prints the table and what was claimed; returns 1 if a claim failed."""
    printer = console.Console()
    printer.print(drawn(outcome))
    for where, names in sorted(by_noise(outcome.runs).items()):
        text = f"{where} the noise of the seeds: {'; '.join(names)}"
        printer.print(text, highlight=False)
    for claim, came_true in outcome.claims.items():
        word = "[green]true[/]" if came_true else "[red]FALSE[/]"
        printer.print(f"{word}: {claim}", highlight=False)
    if outcome.plot:
        printer.print(f"picture: {pathlib.Path(outcome.plot)}")
    return int(not outcome.healthy)
