"""Replaces Keras's ops and some methods while a rule is active.

Keras looks up its ops in a few modules. While a rule is active for any caller,
these modules are replaced by copies. Their functions, and the operators of
tensors, look up the caller's rules and compute by them (`apply`).
"""

import contextlib
import functools
import inspect
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from tfmix._keras import (
    context_values,
    op_places,
    replacing,
)
from tfmix.ops import apply, logits, ways
from tfmix.policy import op_lists
from tfmix.policy import policy as policies

Maker = Callable[[Any], Any]

_OPS = {*op_lists.NARROW, *op_lists.DEFAULT_FLOAT32_OPS, *ways.WAYS}


class Method(NamedTuple):
    """A method that is replaced besides ops, and what makes its stand-in.

    Attributes:
        places: The owner and the name of each method, or what finds these.
        make: Takes the original, and returns what replaces it.
        rule: The rule under which it is replaced, and holds.
        always: Whether it holds for every caller while it is replaced. Then it
            is made at once (see `late`).
    """

    places: Sequence[replacing.Place] | Callable[[], Sequence]
    make: Maker
    rule: str = policies.SIXTEEN_BIT
    always: bool = False


# The methods that are replaced (`autocast.replaced`).
_methods: list[Method] = []

_lock = threading.RLock()
_replacements = replacing.Replacements()
# Rules of running blocks, counted over all threads.
_running: Counter[frozenset[str]] = Counter()
# What is replaced now.
_replaced: frozenset[str] = frozenset()


def use(methods: Iterable[Method]) -> None:
    """Sets which methods are replaced besides ops."""
    _methods[:] = methods


def install(wanted: Iterable[str]) -> None:
    """Activates exactly these rules for the process.

    Functions traced earlier (`tf.function`, `jax.jit`, a model's compiled
    `train_step`) keep the rules they were traced under.
    """
    with _lock:
        context_values.installed.rules = frozenset(wanted)
        running = [names for names, blocks in _running.items() if blocks]
        _replace(context_values.installed.rules.union(*running))


def installed() -> frozenset[str]:
    """Returns the rules that are active outside blocks."""
    return context_values.installed.rules


@contextlib.contextmanager
def block(names: Iterable[str]) -> Iterator[None]:
    """Runs a block under exactly these rules, whatever is installed.

    Other threads, and the code after the block, keep their rules.
    """
    wanted = frozenset(names)
    if context_values.block.get().rules == wanted:
        # The block around this one lasts longer.
        yield
        return
    with _replacing(wanted), context_values.holding(rules=wanted):
        yield


@contextlib.contextmanager
def _replacing(wanted: frozenset[str]) -> Iterator[None]:
    """Replaces what rules need, until `install` is called after the block.

    A model with a policy runs each call in a block, and would otherwise replace
    and restore them each time.
    """
    with _lock:
        _running[wanted] += 1
        _replace(_replaced | wanted)
    try:
        yield
    finally:
        with _lock:
            _running[wanted] -= 1


def block_as_now() -> Callable[[], contextlib.AbstractContextManager]:
    """Returns what replaces the caller's names later, in a copied context.

    The block in which the context was copied may have ended.
    """
    return functools.partial(_replacing, context_values.active_rules())


def _replace(needed: frozenset[str]) -> None:
    """Replaces exactly what rules need."""
    global _replaced
    if needed != _replaced:
        _replacements.set(_makers_for(needed) if needed else {})
        _replaced = needed


def _makers_for(names: frozenset[str]) -> dict[replacing.Place, Maker]:
    """Returns what a set of rules replaces, with functions that make it."""
    makers: dict[replacing.Place, Maker] = {}
    ops = set(names) - {policies.SIXTEEN_BIT}
    if policies.SIXTEEN_BIT in names:
        ops |= _OPS
        for place, (name, is_reversed) in op_places.OPERATORS.items():
            makers[place] = functools.partial(
                _of_op, name=name, is_reversed=is_reversed
            )
    for name in ops:
        # A module is copied as a whole, with a stand-in for each of its ops.
        makers |= dict.fromkeys(
            op_places.targets(name), functools.partial(_of_op, name=name)
        )
    for method in _methods:
        if method.rule in names:
            places = method.places
            make = functools.partial(_of_method, method=method)
            makers |= dict.fromkeys(
                places() if callable(places) else places, make
            )
    return makers


def _of_op(original: Any, name: str, is_reversed: bool = False) -> Any:
    """Returns a function that computes an op by the rules of its caller."""
    if inspect.ismodule(original):
        copy = op_places.copy_module(original, _by_rules)
        for name in logits.LOSSES.keys() & vars(copy).keys():
            # These also hold where a loop computes the loss, outside of rules.
            make = late(logits.recovering)
            setattr(copy, name, make(getattr(copy, name)))
        return copy
    if isinstance(original, staticmethod):
        return staticmethod(_by_rules(original.__func__, name))
    return _by_rules(original, name, is_reversed=is_reversed)


_by_rules = functools.partial(apply.by_rules, ways=ways.WAYS)


def late(make: Maker) -> Maker:
    """Returns a maker whose stand-in calls `make` when it is first called."""

    def made_late(original: Callable) -> Callable:
        made = functools.cache(functools.partial(make, original))

        @functools.wraps(original)
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            return made()(*args, **kwargs)

        return stand_in

    return made_late


def _of_method(original: Any, method: Method) -> Any:
    """Returns a method that is replaced for callers under its rule."""
    if method.always:
        return method.make(original)
    # Many of these are never called.
    replaced = functools.cache(functools.partial(method.make, original))

    @functools.wraps(original)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        if method.rule in context_values.active_rules():
            return replaced()(*args, **kwargs)
        return original(*args, **kwargs)

    return stand_in
