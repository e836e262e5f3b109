"""Tables that print the same as text, in a terminal and in a notebook."""

import abc
import html
import io
from typing import Any

import rich.console

# Wide enough for the longest line of advice; a terminal wraps it.
_WIDTH = 160


class Printed(abc.ABC):
    """Gives what rich can draw a `str` and a notebook form."""

    @abc.abstractmethod
    def __rich__(self) -> Any:
        """Returns a table, or a group of them."""

    def __str__(self) -> str:
        console = rich.console.Console(
            file=io.StringIO(), width=_WIDTH, color_system=None
        )
        with console.capture() as captured:
            console.print(self)
        return captured.get()

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"
