"""What goes on and for how long, on a terminal; elsewhere nothing is said."""

import contextlib
import sys
from collections.abc import Callable, Iterator

import rich.console
import rich.progress


@contextlib.contextmanager
def shown(
    what: str, *, hidden: bool = False
) -> Iterator[Callable[[str], None]]:
    """Shows a line that moves while it is open, on stderr.

    Args:
        what: The line.
        hidden: Whether to show nothing on a terminal either.

    Yields:
        A function that takes another line.
    """
    columns = (
        rich.progress.SpinnerColumn(),
        rich.progress.TextColumn("{task.description}"),
        rich.progress.TimeElapsedColumn(),
    )
    console = rich.console.Console(stderr=True)
    with rich.progress.Progress(
        *columns,
        console=console,
        transient=True,
        disable=hidden or not sys.stderr.isatty(),
    ) as bar:
        task = bar.add_task(what, total=None)

        def say(line: str) -> None:
            bar.update(task, description=line)

        yield say
