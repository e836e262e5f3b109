"""Replaces Keras's ops and some methods while a rule is active.

Keras looks up its ops in a few modules. While a rule is active for any caller,
these modules are replaced by copies. Their functions, and the operators of
tensors, look up the caller's rules and compute by them (`compute`).
"""

import contextlib
import functools
import inspect
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import keras

from tfmix._keras import (
    context_values,
    op_places,
    operators,
    replacements,
)
from tfmix.ops import compute, losses_from_logits, table
from tfmix.policy import policy as policies

# Every 16-bit policy has this rule, in addition to its ops.
SIXTEEN_BIT = "(16 bit)"

Maker = Callable[[Any], Any]


class Method(NamedTuple):
    """A method that is replaced besides ops, and what makes its stand-in.

    Attributes:
        place: The owner and the name of the method.
        make: Takes the original, and returns what replaces it.
        rule: The rule under which it is replaced, and holds.
        always: Whether it holds for every caller while it is replaced.
    """

    place: replacements.Place
    make: Maker
    rule: str = SIXTEEN_BIT
    always: bool = False


# Lists the methods (`autocast.replaced`).
_methods: Callable[[], Iterable[Method]] = tuple

_lock = threading.RLock()
_replacements = replacements.Replacements()
# These rules are active outside blocks.
_installed: frozenset[str] = frozenset()
# Rules of running blocks, counted over all threads.
_running: Counter[frozenset[str]] = Counter()
# These stay replaced until the next `install`, even without a block.
_kept: frozenset[str] = frozenset()
_replaced: frozenset[str] = frozenset()


def use(methods: Callable[[], Iterable[Method]]) -> None:
    """Sets what lists the methods that are replaced besides ops."""
    global _methods
    _methods = methods


def rules_of(policy: keras.DTypePolicy | None) -> frozenset[str]:
    """Returns the rules of a policy; there are none without 16 bit."""
    if policy is None or not policies.is_sixteen_bit(policy):
        return frozenset()
    return frozenset({*policies.with_rules(policy).float32_ops, SIXTEEN_BIT})


def install(rules: Iterable[str]) -> None:
    """Activates exactly these rules for the process.

    Functions traced earlier (`tf.function`, `jax.jit`, a model's compiled
    `train_step`) keep the rules they were traced under.
    """
    global _installed, _kept
    with _lock:
        _installed, _kept = frozenset(rules), frozenset()
        _refresh()


def installed() -> frozenset[str]:
    """Returns the rules that are active outside blocks."""
    return _installed


def keep(rules: frozenset[str]) -> None:
    """Keeps the replacements of these rules until the next `install`.

    A model with a policy runs each call in a block, and would otherwise replace
    and restore them each time.
    """
    global _kept
    if not rules <= _kept:
        with _lock:
            _kept |= rules
            _refresh()


@contextlib.contextmanager
def block(rules: Iterable[str]) -> Iterator[None]:
    """Runs a block under exactly these rules, whatever is installed.

    Other threads, and the code after the block, keep their rules.
    """
    wanted = frozenset(rules)
    if context_values.block.get().rules == wanted:
        # The block around this one lasts longer.
        yield
        return
    with _replacing(wanted), context_values.holding(rules=wanted):
        yield


@contextlib.contextmanager
def _replacing(rules: frozenset[str]) -> Iterator[None]:
    with _lock:
        _running[rules] += 1
        _refresh()
    try:
        yield
    finally:
        with _lock:
            _running[rules] -= 1
            _refresh()


def block_as_now() -> Callable[[], contextlib.AbstractContextManager]:
    """Returns what replaces the caller's names later, in a copied context.

    The block in which the context was copied may have ended.
    """
    return functools.partial(_replacing, of_caller())


def of_caller() -> frozenset[str]:
    """Returns the caller's active rules."""
    local = context_values.block.get().rules
    return _installed if local is None else local


def _refresh() -> None:
    """Replaces exactly what active rules need."""
    global _replaced
    running = [rules for rules, blocks in _running.items() if blocks]
    needed = _installed.union(_kept, *running)
    if needed != _replaced:
        _replacements.set(_makers_for(needed) if needed else {})
        _replaced = needed


def _makers_for(rules: frozenset[str]) -> dict[replacements.Place, Maker]:
    """Returns what a set of rules replaces, with functions that make it."""
    makers: dict[replacements.Place, Maker] = {}
    ops = set(rules) - {SIXTEEN_BIT}
    if SIXTEEN_BIT in rules:
        ops |= set(table.OPS)
        for place, (name, is_reversed) in operators.PLACES.items():
            makers[place] = functools.partial(
                _of_op, name=name, is_reversed=is_reversed
            )
    for name in ops:
        # A module is copied as a whole, with a stand-in for each of its ops.
        makers |= dict.fromkeys(
            op_places.targets(name), functools.partial(_of_op, name=name)
        )
    for method in _methods():
        if method.rule in rules:
            makers[method.place] = functools.partial(_of_method, method=method)
    return makers


def _of_op(original: Any, name: str, is_reversed: bool = False) -> Any:
    """Returns a function that computes an op by the rules of its caller."""
    if inspect.ismodule(original):
        return op_places.copy_module(original, _of_op)
    if isinstance(original, staticmethod):
        return staticmethod(_of_op(original.__func__, name))
    op = compute.Function(
        original,
        table.of(name),
        is_composed=op_places.is_composed(original),
        is_reversed=is_reversed,
    )

    local, computed = compute.local, compute.computed

    @functools.wraps(original)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        if local.inside:
            return original(*args, **kwargs)
        rules = of_caller()
        if not rules:
            return original(*args, **kwargs)
        return computed(op, args, kwargs, name in rules)

    if name in losses_from_logits.ACTIVATIONS:
        return losses_from_logits.noting(stand_in, of_caller)
    if name in losses_from_logits.LOSSES:
        # It also holds where a loop computes the loss, outside of the rules.
        return losses_from_logits.recovering(stand_in)
    return stand_in


def _of_method(original: Any, method: Method) -> Any:
    """Returns a method that is replaced for callers under its rule."""
    if isinstance(original, property):
        return property(_of_method(original.fget, method))
    replaced = method.make(original)

    @functools.wraps(original)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        if method.always or method.rule in of_caller():
            return replaced(*args, **kwargs)
        return original(*args, **kwargs)

    return stand_in
