"""Names switched on for the process or for a block, and by whom."""

import contextlib
import contextvars
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

Stand = Callable[[frozenset[str], Callable[[str], bool]], None]


class Switchboard:
    """Holds which names are in force, per process and per block.

    Blocks are counted over all threads, so that what they need stands for as
    long as one of them runs; whether a name holds for the caller is decided
    by the innermost block of the caller's own thread.

    Args:
        name: Label of the context variable, for debuggers.
        stand: Called under a lock with all names that anybody needs and with
            `holds`, each time that set of names changes.
    """

    def __init__(self, name: str, stand: Stand) -> None:
        self._stand = stand
        self._lock = threading.RLock()
        self._installed: frozenset[str] = frozenset()
        self._standing: frozenset[str] = frozenset()
        self._borrowed: Counter[str] = Counter()
        self._local: contextvars.ContextVar[frozenset[str] | None] = (
            contextvars.ContextVar(name, default=None)
        )

    @property
    def installed(self) -> frozenset[str]:
        """The names in force where no block says otherwise."""
        return self._installed

    def install(self, names: Iterable[str]) -> None:
        """Puts exactly these names in force for the process."""
        with self._lock:
            self._installed = frozenset(names)
            self._refresh()

    @contextlib.contextmanager
    def block(self, names: Iterable[str]) -> Iterator[None]:
        """Puts exactly these names in force for the caller's block."""
        wanted = frozenset(names)
        with self._lock:
            self._borrowed.update(wanted)
            self._refresh()
        token = self._local.set(wanted)
        try:
            yield
        finally:
            self._local.reset(token)
            with self._lock:
                self._borrowed.subtract(wanted)
                self._refresh()

    def holds(self, name: str) -> bool:
        """Says whether a name is in force for the caller."""
        local = self._local.get()
        return name in (self._installed if local is None else local)

    def _refresh(self) -> None:
        borrowed = {name for name, users in self._borrowed.items() if users}
        names = self._installed | borrowed
        if names != self._standing:
            self._stand(names, self.holds)
            self._standing = names
