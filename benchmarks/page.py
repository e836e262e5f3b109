"""Renders the page of results from records, as Markdown."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import catalogue

_INTRODUCTION = """\
# Benchmarks

<!-- Made by `make bench`, not by hand. -->

`make bench` measures all of this again, `make bench ONLY="gpu faults"` some.
The JSON files in `docs/benchmarks/` have more benchmarks and rows, and the
machines.

A cell such as 1.06 (1.02–1.11) is the median with the least and the most, or
what the line below says. Timed runs that are compared took turns.
"""
# Timings are no more exact than a percent, so three digits are enough.
_DIGITS = 3


def cell(value: Any) -> str:
    """Returns a cell as text.

    Args:
        value: Text, a number, a truth value, `None`, or a dict with
            `median`, `low` and `high`.

    Example:
        >>> cell(None), cell(1234.5), cell(0.01234)
        ('–', '1,234', '0.0123')
    """
    if value is None:
        return "–"
    if isinstance(value, dict):
        middle, low, high = (
            cell(value[key]) for key in ("median", "low", "high")
        )
        return f"{middle} ({low}–{high})"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return _number(value)
    return str(value)


def _number(value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size == 0:
        return "0"
    # The place of the first digit: 1 for units, 0 for tenths.
    place = math.floor(math.log10(size)) + 1
    # Ratios near 1 have the same digits: 0.98 and 1.02, not 0.984 and 1.02.
    decimals = 2 if place == 0 else max(_DIGITS - place, 0)
    return f"{value:,.{decimals}f}"


def render(records: Sequence[dict[str, Any]]) -> str:
    """Returns the whole page.

    Args:
        records: As `results.Run.record` returns them, in any order.
    """
    sections = [_INTRODUCTION]
    for benchmark in catalogue.BENCHMARKS:
        if not benchmark.on_page:
            continue
        own = [r for r in records if r["name"].split("/")[0] == benchmark.name]
        sections.append(section(benchmark, own))
    return "\n".join(sections)


def section(
    benchmark: catalogue.Benchmark, records: Sequence[dict[str, Any]]
) -> str:
    """Returns the part of the page on one benchmark."""
    lines = [f"## {benchmark.title}", "", benchmark.about, ""]
    if not records:
        lines += ["Not measured yet.", ""]

    def order(record: dict[str, Any]) -> int:
        return benchmark.backends.index(record["backend"])

    for record in sorted(records, key=order):
        lines += _lines(record, benchmark)
    return "\n".join(lines)


def _lines(
    record: dict[str, Any], benchmark: catalogue.Benchmark
) -> Iterator[str]:
    """Yields the lines of one record: tables, then their origin."""
    tables = [*_quoted(record, benchmark)]
    for table in tables:
        if table["rows"] is not None:
            yield f"**{_escaped(table['title'])}**"
            yield ""
            yield from _table(table["rows"])
            yield ""
        if table["note"]:
            yield _escaped(table["note"])
            yield ""
    if tables:
        yield _provenance(record)
        yield ""


def _quoted(
    record: dict[str, Any], benchmark: catalogue.Benchmark
) -> Iterator[dict[str, Any]]:
    """Yields the tables of a record that the page shows.

    The rows of a table are `None` if only its note is shown.
    """
    tables = {
        table["title"]: table
        for table in record["tables"]
        if table["title"] not in benchmark.unquoted
    }
    if benchmark.quotes is None:
        yield from tables.values()
        return
    for quote in benchmark.quotes:
        if quote.backend != record["backend"] or quote.table not in tables:
            continue
        table = tables[quote.table]
        if quote.only_note:
            yield {**table, "rows": None}
            continue
        rows = [
            {name: row[name] for name in quote.columns or row}
            for row in table["rows"]
            if all(row[name] in some for name, some in quote.where.items())
        ]
        yield {**table, "rows": rows}


def _table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    if not rows:
        yield "Nothing to show."
        return
    columns = list(rows[0])
    yield _row(columns)
    numbers = [any(_is_number(r.get(c)) for r in rows) for c in columns]
    yield _row(["--:" if number else "---" for number in numbers])
    for row in rows:
        yield _row([_escaped(cell(row.get(column))) for column in columns])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | dict)


def _escaped(text: str) -> str:
    # A bar ends a cell, a line break ends the table, `<` opens a tag, and two
    # pairs of brackets make a link.
    text = " ".join(text.split())
    text = text.replace("|", r"\|").replace("<", "&lt;")
    return text.replace("] [", r"] \[")


def _provenance(record: dict[str, Any]) -> str:
    """Returns one line: when, how and on what a record was measured."""
    machine, versions = record["machine"], record["versions"]
    backend = record["backend"]
    what = ", ".join(
        f"{name} {versions[name]}"
        for name in ("keras", backend, f"{backend}-cpu")
        if name in versions
    )
    on = machine.get("gpu") or f"CPU cores: {machine['cores']}"
    command = f"`{record['command']}`" if record["command"] else ""
    parts = [record["date"][:10], command, on, what, _escaped(record["how"])]
    return f"<small>{'; '.join(filter(None, parts))}</small>"
