"""Tables that print the same as text, in a terminal and in a notebook."""

import abc
import dataclasses
import io
import shutil
from collections.abc import Sequence

import rich.box
import rich.console
import rich.jupyter
import rich.markup
import rich.table
import rich.text

# A cell of up to this length is never broken.
_WHOLE = 24


@dataclasses.dataclass(frozen=True)
class Table:
    """One table as plain text."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""  # a line above the table
    notes: Sequence[str] = ()  # lines below it
    code: Sequence[str] = ()  # lines to copy, at the end

    def __rich_console__(
        self,
        console: rich.console.Console,
        options: rich.console.ConsoleOptions,
    ) -> rich.console.RenderResult:
        if self.title:
            yield rich.text.Text(self.title, style="bold")
        yield self._drawn()
        yield ""
        yield from map(rich.text.Text, self.notes)
        for line in self.code:
            yield rich.text.Text(line, overflow="fold")

    def _drawn(self) -> rich.table.Table:
        drawn = rich.table.Table(
            box=rich.box.SIMPLE_HEAD,
            show_edge=False,
            pad_edge=False,
            padding=(0, 1, 0, 0),
        )
        for head, *cells in zip(self.heads, *self.rows, strict=True):
            # Only long names and sentences are wrapped; numbers and shapes are
            # not.
            is_long = max(map(len, [*cells, ""])) > _WHOLE
            drawn.add_column(
                rich.markup.escape(head), no_wrap=not is_long, overflow="fold"
            )
        for row in self.rows:
            # Names and advice contain brackets, which rich takes for markup.
            drawn.add_row(*map(rich.markup.escape, row))
        return drawn


class Printed(abc.ABC, rich.jupyter.JupyterMixin):
    """Prints the tables of a subclass: `str`, rich and notebook form."""

    @abc.abstractmethod
    def tables(self) -> Sequence[Table]:
        """Returns the tables to print."""

    def __rich__(self) -> rich.console.Group:
        return rich.console.Group(*self.tables())

    def __str__(self) -> str:
        # Files and pipes have no width: 160 columns hold most advice.
        width = shutil.get_terminal_size((160, 24)).columns
        out = io.StringIO()
        rich.console.Console(file=out, width=width, color_system=None).print(
            self
        )
        return out.getvalue()
