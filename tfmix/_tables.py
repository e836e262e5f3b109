"""Tables that print the same as text, in a terminal and in a notebook."""

import abc
import dataclasses
import html
import io
from collections.abc import Sequence

import rich.box
import rich.console
import rich.markup
import rich.table

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
        return rich.console.Group(*above, drawn, *below)

    def html(self) -> str:
        """Returns an HTML table; a row's verdict is its class."""
        rows = "\n".join(
            f'<tr class="{self._verdict(index)}">{_cells("td", row)}</tr>'
            for index, row in enumerate(self.rows)
        )
        title = f"<p>{html.escape(self.title)}</p>\n" if self.title else ""
        notes = "".join(f"\n<p>{html.escape(one)}</p>" for one in self.notes)
        return (
            f"{title}<table><thead><tr>{_cells('th', self.heads)}</tr></thead>"
            f"\n<tbody>{rows}</tbody></table>{notes}"
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
        # Wide enough for the longest line of advice; a terminal wraps it.
        console = rich.console.Console(
            file=io.StringIO(), width=160, color_system=None
        )
        with console.capture() as captured:
            console.print(self)
        return captured.get()

    def _repr_html_(self) -> str:
        return "\n".join(table.html() for table in self.tables())


def _cells(tag: str, cells: Sequence[str]) -> str:
    return "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells)
