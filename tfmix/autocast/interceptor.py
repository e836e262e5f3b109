"""Replaces Keras's ops and some methods while a rule is active.

Keras looks up its ops in a few modules. While a rule is active for any caller,
these modules are replaced by copies. Their functions look up the caller's rules
and apply them to Keras's own function.
"""

import contextlib
import functools
import inspect
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras

from tfmix._keras import (
    context_values,
    gradients,
    layers,
    op_places,
    penalties,
    replacements,
    scalars,
)
from tfmix.autocast import bare_optimizers, fallback
from tfmix.ops import (
    finite_constants,
    float32_ops,
    losses_from_logits,
    recomputation,
    small_numbers,
    weight_gradients,
)
from tfmix.policy import policy as policies

# Every 16-bit policy has this rule, in addition to its ops.
SIXTEEN_BIT = "(16 bit)"
# A replacement with this rule is used for every caller.
_ALWAYS = None

Maker = Callable[[Any], Any]


class Row(NamedTuple):
    """A rule, and the function that makes its replacement."""

    rule: str | None
    make: Maker


def rows_of_op(name: str) -> list[Row]:
    """Lists the rules of an op with their replacements, innermost first."""
    rows = _rows_in_16_bit(name, [weight_gradients.OPS])
    if name != op_places.ATTENTION:
        rows.append(Row(name, float32_ops.in_float32))
    elif not op_places.has_float32_logits():
        rows.append(Row(name, float32_ops.attention))
    rows += _rows_in_16_bit(name, _NUMBERS)
    rows += _rows_in_16_bit(name, [losses_from_logits.ACTIVATIONS])
    if name in losses_from_logits.LOSSES:
        # It also holds where a loop computes the loss, outside the model's
        # rules.
        rows.append(Row(_ALWAYS, losses_from_logits.recovering))
    return rows


def _rows_in_16_bit(
    name: str, tables: Iterable[Mapping[str, Maker]]
) -> list[Row]:
    return [Row(SIXTEEN_BIT, made[name]) for made in tables if name in made]


# These hold for ops, and for operators of tensors and functions beside them.
_NUMBERS = finite_constants.OPS, small_numbers.OPS
# Ops that every 16-bit policy replaces, whatever its own rules are.
_OPS_IN_16_BIT = {
    *weight_gradients.OPS,
    *finite_constants.OPS,
    *small_numbers.OPS,
    *losses_from_logits.ACTIVATIONS,
    *losses_from_logits.LOSSES,
}


def _recomputed(original: Callable) -> Callable:
    return recomputation.alike(original, _block_as_now)


# These are methods rather than ops.
_METHODS: dict[replacements.Place, list[Row]] = {
    **dict.fromkeys(penalties.PLACES, [Row(SIXTEEN_BIT, float32_ops.widened)]),
    **{
        (owner, name): _rows_in_16_bit(name, _NUMBERS)
        for owner, name in scalars.PLACES
    },
    layers.ASSIGN: [Row(SIXTEEN_BIT, fallback.assigning_exactly)],
    **dict.fromkeys(recomputation.PLACES, [Row(_ALWAYS, _recomputed)]),
    **dict.fromkeys(
        gradients.TRACE, [Row(_ALWAYS, gradients.traced_for_gradients)]
    ),
    **{
        place: [Row(SIXTEEN_BIT, make)]
        for place, make in weight_gradients.METHODS.items()
    },
}
_APPLYING = [Row(SIXTEEN_BIT, bare_optimizers.applying)]
_ATTENTION = [Row(op_places.ATTENTION, float32_ops.attention_in_float32)]

_lock = threading.RLock()
_replacements = replacements.Replacements()
# These rules are active outside blocks.
_installed: frozenset[str] = frozenset()
# Rules of running blocks, counted over all threads.
_running: Counter[frozenset[str]] = Counter()
# These stay replaced until the next `install`, even without a block.
_kept: frozenset[str] = frozenset()
_replaced: frozenset[str] = frozenset()


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


def _block_as_now() -> Callable[[], contextlib.AbstractContextManager]:
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
    methods: dict[replacements.Place, list[Row]] = {}
    if SIXTEEN_BIT in rules:
        ops |= _OPS_IN_16_BIT
        methods |= _METHODS
        methods |= dict.fromkeys(bare_optimizers.places(), _APPLYING)
    if op_places.ATTENTION in rules:
        methods |= dict.fromkeys(op_places.ATTENTION_METHODS, _ATTENTION)
    for name in ops:
        # A module is copied as a whole, with a wrapper for each of its ops.
        make = functools.partial(_intercepted_op, name=name)
        makers |= dict.fromkeys(op_places.targets(name), make)
    for place, rows in methods.items():
        makers[place] = functools.partial(_intercepted, rows=rows)
    return makers


def _intercepted_op(original: Any, name: str) -> Any:
    if inspect.ismodule(original):
        return op_places.copy_module(original, _intercepted_op)
    return _intercepted(original, rows_of_op(name))


def _intercepted(original: Any, rows: Sequence[Row]) -> Any:
    """Returns a function that applies the rows that hold for its caller."""
    if isinstance(original, property):
        return property(_intercepted(original.fget, rows))
    if isinstance(original, staticmethod):
        return staticmethod(_intercepted(original.__func__, rows))
    composed: dict[frozenset[str], Callable] = {}
    sometimes = all(row.rule is not _ALWAYS for row in rows)

    @functools.wraps(original)
    def intercepted(*args: Any, **kwargs: Any) -> Any:
        rules = of_caller()
        if sometimes and not rules:
            return original(*args, **kwargs)
        call = composed.get(rules)
        if call is None:
            call = original
            for row in rows:
                if row.rule is _ALWAYS or row.rule in rules:
                    call = row.make(call)
            composed[rules] = call
        return call(*args, **kwargs)

    return intercepted
