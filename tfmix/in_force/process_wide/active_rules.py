"""Which rules are in force, for the process or for a block of code."""

import contextlib
import contextvars
import threading
from collections import Counter
from collections.abc import Iterable, Iterator

from tfmix import _context_values
from tfmix._keras import replacements
from tfmix.in_force.process_wide import ops

_lock = threading.RLock()
_replacements = replacements.Replacements()
# In force where no block says otherwise.
_installed: frozenset[str] = frozenset()
# Needed by blocks that are running now, counted over all threads.
_running: Counter[frozenset[str]] = Counter()
# Replaced until the next `install`, whether a block runs or not.
_standing_by: frozenset[str] = frozenset()
_replaced: frozenset[str] = frozenset()
_local: contextvars.ContextVar[frozenset[str] | None] = contextvars.ContextVar(
    "tfmix_rules", default=None
)


def install(rules: Iterable[str]) -> None:
    """Puts exactly these rules in force for the process.

    Functions traced earlier (`tf.function`, `jax.jit`, a model's compiled
    `train_step`) keep the rules they were traced under.
    """
    global _installed, _standing_by
    with _lock:
        _installed, _standing_by = frozenset(rules), frozenset()
        _refresh()


def installed() -> frozenset[str]:
    """Returns the rules in force where no block says otherwise."""
    return _installed


def stand_by(rules: frozenset[str]) -> None:
    """Keeps what rules replace in its place until the next `install`.

    For a model that carries its policy: its calls are blocks, and each would
    replace and put back.
    """
    global _standing_by
    if not rules <= _standing_by:
        with _lock:
            _standing_by |= rules
            _refresh()


@contextlib.contextmanager
def block(rules: Iterable[str]) -> Iterator[None]:
    """Runs a block under exactly these rules, whatever is installed.

    Other threads, and the code after the block, keep theirs.
    """
    wanted = frozenset(rules)
    with _lock:
        _running[wanted] += 1
        _refresh()
    try:
        with _context_values.set_to(_local, wanted):
            yield
    finally:
        with _lock:
            _running[wanted] -= 1
            _refresh()


def holds(rule: str) -> bool:
    """Says whether a rule is in force for the caller."""
    local = _local.get()
    return rule in (_installed if local is None else local)


def _refresh() -> None:
    """Replaces in Keras what somebody needs, and nothing else."""
    global _replaced
    running = [rules for rules, blocks in _running.items() if blocks]
    needed = _installed.union(_standing_by, *running)
    if needed != _replaced:
        _replacements.set(ops.makers(needed, holds))
        _replaced = needed
