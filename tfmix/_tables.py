"""Tables that print the same as text, in a terminal and in a notebook."""

import abc
import dataclasses
import html
import io
import re
import shutil
from collections.abc import Sequence

import rich.box
import rich.console
import rich.markup
import rich.table
import rich.text

# Spaces between columns; the fewest characters shown of a long name and of a
# sentence; the length up to which a cell is never broken.
_GAP, _LEAST_NAME, _LEAST_TEXT, _WHOLE = 2, 12, 16, 24
_STYLES = {
    "ok": "green",
    "overflow": "bold red",
    "not_finite": "bold red",
    "underflow": "yellow",
    "inaccurate": "yellow",
}


@dataclasses.dataclass(frozen=True)
class Table:
    """One table as plain text."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""  # a line above the table
    notes: Sequence[str] = ()  # lines below it
    code: Sequence[str] = ()  # lines to copy, at the end
    # One for each row, which sets its colour; empty for rows without.
    verdicts: Sequence[str] = ()

    def __rich_console__(
        self,
        console: rich.console.Console,
        options: rich.console.ConsoleOptions,
    ) -> rich.console.RenderResult:
        if self.title:
            yield rich.markup.escape(self.title)
        yield self._drawn(options.max_width)
        yield ""
        yield from map(rich.markup.escape, self.notes)
        for line in self.code:
            yield rich.text.Text(line, overflow="fold")

    def _drawn(self, width: int) -> rich.table.Table:
        columns = [*zip(self.heads, *self.rows, strict=True)]
        drawn = rich.table.Table(
            box=rich.box.SIMPLE_HEAD,
            show_edge=False,
            pad_edge=False,
            padding=(0, _GAP - 1, 0, 0),
        )
        for head, *cells in columns:
            # The lines of sentences are broken; numbers, shapes and what is
            # short stay whole.
            is_text = max(map(len, [*cells, ""])) > _WHOLE
            drawn.add_column(head, no_wrap=not is_text, overflow="fold")
        others = sum(map(_least_width, columns[1:]))
        names = width - others - _GAP * len(columns)
        for index, (name, *row) in enumerate(self.rows):
            # Names and advice hold brackets, which rich takes for markup.
            cells = [_shortened(name, names), *row]
            style = _STYLES.get(self._verdict(index))
            drawn.add_row(*map(rich.markup.escape, cells), style=style)
        return drawn

    def html(self) -> str:
        """Returns an HTML table; a row's verdict is its class."""
        rows = "\n".join(
            f'<tr class="{self._verdict(index)}">{self._cells(row)}</tr>'
            for index, row in enumerate(self.rows)
        )
        heads = "".join(f"<th>{html.escape(head)}</th>" for head in self.heads)
        title = f"<p>{html.escape(self.title)}</p>\n" if self.title else ""
        notes = "".join(f"\n<p>{_with_code(note)}</p>" for note in self.notes)
        code = html.escape("\n".join(self.code))
        return (
            f"{title}<table><thead><tr>{heads}</tr></thead>"
            f"\n<tbody>{rows}</tbody></table>{notes}"
            + (
                "\n<pre style='white-space: pre-wrap'><code>"
                f"{code}</code></pre>" * bool(code)
            )
        )

    def _cells(self, row: Sequence[str]) -> str:
        # On a narrow screen a page shows the labels in place of the heads.
        return "".join(
            f'<td data-label="{html.escape(head)}">{html.escape(cell)}</td>'
            for head, cell in zip(self.heads, row, strict=True)
        )

    def _verdict(self, index: int) -> str:
        return self.verdicts[index] if self.verdicts else ""


def _with_code(note: str) -> str:
    """Returns a note as HTML, with its names in backticks as code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", html.escape(note))


def _least_width(column: Sequence[str]) -> int:
    """Returns the width that a column is left at least."""
    longest = max(map(len, column))
    return longest if longest <= _WHOLE else _LEAST_TEXT


def _shortened(name: str, width: int) -> str:
    """Leaves out the middle of a long path; its end tells most."""
    width = max(width, _LEAST_NAME)
    if len(name) <= width or " " in name:
        return name
    end = 2 * width // 3
    return f"{name[: width - end - 1]}…{name[-end:]}"


class Printed(abc.ABC):
    """Prints the tables of a subclass: `str`, rich and notebook form."""

    @abc.abstractmethod
    def tables(self) -> Sequence[Table]:
        """Returns what to print."""

    def __rich__(self) -> rich.console.Group:
        return rich.console.Group(*self.tables())

    def __str__(self) -> str:
        # As wide as the terminal; a file or a pipe has room for most advice.
        width = shutil.get_terminal_size((160, 24)).columns
        out = io.StringIO()
        rich.console.Console(file=out, width=width, color_system=None).print(
            self
        )
        return out.getvalue()

    def _repr_html_(self) -> str:
        tables = "\n".join(table.html() for table in self.tables())
        # Jupyter moves the cells of a table to the right, names as well.
        return (
            '<div class="tfmix" style="overflow-x: auto">'
            "<style>div.tfmix :is(th, td) { text-align: left !important; }"
            "</style>"
            f"{tables}</div>"
        )
