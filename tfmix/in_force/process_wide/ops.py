"""Rules in force: Keras ops, and penalties, in float32 on 16-bit input."""

import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any

import keras

from tfmix import _formats
from tfmix._keras import op_places, penalties, replacements
from tfmix.in_force.process_wide import (
    bare_optimizers,
    finite_constants,
    recomputation,
    softmax_logits,
    tensors,
    weight_gradients,
)

# Regularizers, added losses: in force under every 16-bit policy, beside what is
# named like ops. They are widened at their door, beside a compiled loss.
PENALTIES = "(penalties)"

# Says whether a rule is in force for the caller.
Holds = Callable[[str], bool]


def makers(
    rules: Collection[str], holds: Holds
) -> dict[replacements.Place, Callable[[Any], Any]]:
    """Returns what to replace for a set of rules, and by what."""
    names = set(rules)
    if rules and keras.backend.backend() == "jax":
        names.update(softmax_logits.LOSSES)
    by_place: dict[replacements.Place, Callable[[Any], Any]] = {
        place: functools.partial(_rule, name=name, holds=holds)
        for name in names
        for place in op_places.targets(name)
    }
    if PENALTIES in rules:
        widening = functools.partial(_widening, holds=holds)
        by_place |= dict.fromkeys(penalties.places(), widening)
        in_force = functools.partial(holds, PENALTIES)
        skipping = functools.partial(bare_optimizers.applying, holds=in_force)
        by_place |= dict.fromkeys(bare_optimizers.PLACES, skipping)
        by_place |= dict.fromkeys(recomputation.PLACES, recomputation.alike)
        by_place |= weight_gradients.makers(in_force)
        _keep_finite(by_place, in_force)
    return by_place


def _keep_finite(by_place: dict, holds: Callable[[], bool]) -> None:
    """Lets constants stay finite, around what else replaces an op."""
    places = [
        place
        for name in finite_constants.OPS
        for place in op_places.targets(name)
    ]
    for place in (*places, *op_places.CONVERSIONS):
        inner = by_place.get(place, lambda original: original)
        by_place[place] = functools.partial(
            _saturating, inner=inner, holds=holds
        )


def _saturating(original: Any, inner: Callable, holds: Callable) -> Any:
    return finite_constants.saturating(inner(original), holds)


def _rule(original: Any, name: str, holds: Holds) -> Any:
    if inspect.ismodule(original):
        # One name for many ops; each asks for its own rule.
        rule_for = functools.partial(_rule, holds=holds)
        return op_places.stand_in(original, rule_for)
    if original.__qualname__.endswith(op_places.ATTENTION_METHOD):
        return _attention_rule(original, holds)
    static = isinstance(original, staticmethod)
    function = original.__func__ if static else original
    dtype_at = op_places.dtype_position(function)
    if name in softmax_logits.LOSSES:
        function = softmax_logits.recovering(function)

    @functools.wraps(function)
    def rule(*args: Any, **kwargs: Any) -> Any:
        if not holds(name):
            return function(*args, **kwargs)
        source = tensors.only_16_bit((args, kwargs))
        wanted = op_places.wanted_dtype(args, kwargs, dtype_at)
        if source is None or wanted not in (None, *_formats.SIXTEEN_BIT):
            return function(*args, **kwargs)
        args, kwargs = tensors.map_leaves((args, kwargs), tensors.widen)
        if wanted is not None:
            args, kwargs = op_places.with_float32(args, kwargs, dtype_at)
        result = function(*args, **kwargs)
        narrow = functools.partial(tensors.narrow_once, dtype=wanted or source)
        return tensors.map_leaves(result, narrow)

    return staticmethod(rule) if static else rule


def _attention_rule(original: Callable, holds: Holds) -> Callable:
    """Makes a layer's own attention compute as the op's rule says.

    Logits of 16-bit queries and keys overflow float16 there just the same.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def compute(self: Any, *args: Any, **kwargs: Any) -> Any:
        source = tensors.only_16_bit((args, kwargs))
        bound = signature.bind(self, *args, **kwargs).arguments
        ruled = source is not None and holds(op_places.ATTENTION)
        if not ruled or not op_places.writes_out(self, bound):
            return original(self, *args, **kwargs)
        args, kwargs = tensors.map_leaves((args, kwargs), tensors.widen)
        with op_places.float32_softmax(self):
            result = original(self, *args, **kwargs)
        narrow = functools.partial(tensors.narrow, dtype=str(source))
        return tensors.map_leaves(result, narrow)

    return compute


def _widening(original: Callable, holds: Holds) -> Callable:
    @functools.wraps(original)
    def widened(self: Any, *args: Any, **kwargs: Any) -> Any:
        if holds(PENALTIES):
            args, kwargs = tensors.map_leaves((args, kwargs), tensors.wide)
        return original(self, *args, **kwargs)

    return widened
