"""Tables that print the same as text, in a terminal and in a notebook."""

import abc
import dataclasses
import html
import io
import shutil
from collections.abc import Sequence

import rich.box
import rich.console
import rich.markup
import rich.table
import rich.text

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

    def __rich__(self) -> rich.console.Group:
        drawn = rich.table.Table(box=rich.box.SIMPLE_HEAD)
        for head in self.heads:
            drawn.add_column(head, overflow="fold")
        for index, row in enumerate(self.rows):
            # Names and advice hold brackets, which rich takes for markup.
            style = _STYLES.get(self._verdict(index))
            drawn.add_row(*map(rich.markup.escape, row), style=style)
        above = [rich.markup.escape(self.title)] if self.title else []
        below = map(rich.markup.escape, self.notes)
        code = [rich.text.Text(line, overflow="fold") for line in self.code]
        return rich.console.Group(*above, drawn, *below, *code)

    def html(self) -> str:
        """Returns an HTML table; a row's verdict is its class."""
        rows = "\n".join(
            f'<tr class="{self._verdict(index)}">{self._cells(row)}</tr>'
            for index, row in enumerate(self.rows)
        )
        heads = "".join(f"<th>{html.escape(head)}</th>" for head in self.heads)
        title = f"<p>{html.escape(self.title)}</p>\n" if self.title else ""
        notes = "".join(f"\n<p>{html.escape(one)}</p>" for one in self.notes)
        code = html.escape("\n".join(self.code))
        return (
            f"{title}<table><thead><tr>{heads}</tr></thead>"
            f"\n<tbody>{rows}</tbody></table>{notes}"
            + (f"\n<pre>{code}</pre>" if code else "")
        )

    def _cells(self, row: Sequence[str]) -> str:
        # On a narrow screen a page shows the labels in place of the heads.
        return "".join(
            f'<td data-label="{html.escape(head)}">{html.escape(cell)}</td>'
            for head, cell in zip(self.heads, row, strict=True)
        )

    def _verdict(self, index: int) -> str:
        return self.verdicts[index] if self.verdicts else ""


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
        return "\n".join(table.html() for table in self.tables())
