"""Shows on a terminal or in a notebook what runs, and for how long."""

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator

import rich.console
import rich.progress


@contextlib.contextmanager
def shown(what: str, *, hidden: bool = False) -> Iterator[Callable[..., None]]:
    """Shows a moving line on stderr during a block.

    Args:
        what: The line.
        hidden: Whether to show nothing at all.

    Yields:
        A function that changes the line. With a share of the work, from 0 to
        1, it also shows a bar.
    """
    console = rich.console.Console(stderr=True)
    # In a notebook rich needs ipywidgets, and warns if they are missing.
    has_widgets = importlib.util.find_spec("ipywidgets") is not None
    is_seen = sys.stderr.isatty() or (console.is_jupyter and has_widgets)
    # Before rich 14.3 a disabled bar still ended with an empty line.
    console.quiet = hidden or not is_seen
    with rich.progress.Progress(
        rich.progress.SpinnerColumn(),
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(20),
        rich.progress.TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=console.quiet,
    ) as bar:
        task = bar.add_task(what, total=None)

        def say(line: str, share: float | None = None) -> None:
            total = None if share is None else 1.0
            bar.update(task, description=line, total=total, completed=share)

        yield say
