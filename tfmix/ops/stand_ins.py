"""Replaces Keras's ops while a rule is active.

Keras looks up its ops in a few modules. While a rule is active for any caller,
these modules are replaced by copies. Their functions, and the operators of
tensors, look up the caller's rules and compute by them (`apply`).
"""

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tfmix._keras import context, op_places, replacing
from tfmix.ops import apply, logits, ways
from tfmix.policy import op_lists
from tfmix.policy import policy as policies

_OPS = {*op_lists.NARROW, *op_lists.DEFAULT_FLOAT32_OPS, *ways.WAYS}

_lock = threading.RLock()
# The number of running blocks, over all threads.
_running = 0
# The rules whose names are replaced now.
_replaced: frozenset[str] = frozenset()


def install(wanted: Iterable[str]) -> None:
    """Activates exactly these rules for the process.

    Functions traced earlier (`tf.function`, `jax.jit`, a model's compiled
    `train_step`) keep the rules they were traced under.
    """
    rules = frozenset(wanted)
    with _lock:
        context.installed.rules = rules
        # Running blocks keep what they need.
        _replace(rules | _replaced if _running else rules)


def installed() -> frozenset[str]:
    """Returns the rules that are active outside blocks."""
    return context.installed.rules


@contextlib.contextmanager
def block(names: Iterable[str]) -> Iterator[None]:
    """Runs a block under exactly these rules, whatever is installed.

    Other threads, and the code after the block, keep their rules.
    """
    wanted = frozenset(names)
    if context.block.get().rules == wanted:
        # The block around this one lasts longer.
        yield
        return
    with _replacing(wanted), context.holding(rules=wanted):
        yield


@contextlib.contextmanager
def _replacing(wanted: frozenset[str]) -> Iterator[None]:
    """Replaces what rules need, until `install` is called after the block.

    A model with a policy runs each call in a block, and would otherwise replace
    and restore them each time.
    """
    global _running
    with _lock:
        _running += 1
        _replace(_replaced | wanted)
    try:
        yield
    finally:
        with _lock:
            _running -= 1


def block_as_now() -> Callable[[], contextlib.AbstractContextManager]:
    """Returns what replaces the caller's names later, in a copied context.

    The block in which the context was copied may have ended.
    """
    return functools.partial(_replacing, context.active_rules())


def _replace(needed: frozenset[str]) -> None:
    """Replaces exactly what rules need."""
    global _replaced
    if needed != _replaced:
        replacing.want(replacing.OPS, needed)
        _replaced = needed


def makers(rules: frozenset[str]) -> dict[replacing.Place, replacing.Maker]:
    """Returns what a set of rules replaces of ops, with what makes it."""
    found: dict[replacing.Place, replacing.Maker] = {}
    ops = set(rules) - {policies.SIXTEEN_BIT}
    if policies.SIXTEEN_BIT in rules:
        ops |= _OPS
        for place, (name, is_reversed) in op_places.OPERATORS.items():
            found[place] = functools.partial(
                _of_op, name=name, is_reversed=is_reversed
            )
    for name in ops:
        # A module is copied as a whole, with a stand-in for each of its ops.
        found |= dict.fromkeys(
            op_places.targets(name), functools.partial(_of_op, name=name)
        )
    return found


def _of_op(original: Any, name: str, is_reversed: bool = False) -> Any:
    """Returns a function that computes an op by the rules of its caller."""
    if inspect.ismodule(original):
        copy = op_places.copy_module(original, _by_rules)
        for name in logits.LOSSES.keys() & vars(copy).keys():
            # These also hold where a loop computes the loss, outside of rules.
            make = replacing.lazily(logits.recovering)
            setattr(copy, name, make(getattr(copy, name)))
        return copy
    return _by_rules(original, name, is_reversed=is_reversed)


_by_rules = functools.partial(apply.by_rules, ways=ways.WAYS)
