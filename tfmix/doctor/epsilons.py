"""Constants of a layer that are zero in 16 bit."""

import numbers
from typing import Any

from keras import ops

from tfmix import _formats
from tfmix._keras import layers
from tfmix.doctor import one_layer, probe

_ATTRIBUTES = ("epsilon", "eps", "_epsilon", "_eps")
# A constant guards against an input that is zero, or one that drives some
# value inside to zero, as large logits do behind a softmax.
_PROBES = (0.0, 64.0)


def vanishing(operation: Any, limits: _formats.Format) -> list[float]:
    """Finds positive constants of a layer that the format rounds to zero.

    Args:
        operation: The layer. Its attributes called epsilon are read, and the
            constants in the code of its `call`.
        limits: The 16-bit format.

    Returns:
        The constants, largest first.
    """
    found = [vars(operation).get(name) for name in _ATTRIBUTES]
    if not layers.is_kerass_own(operation):
        found += _constants(getattr(type(operation), "call", None))
    return sorted({v for v in found if _vanishes(v, limits)}, reverse=True)


def shows(judge: one_layer.Judge, call: probe.Call) -> bool:
    """Says whether a call can fail in 16 bit alone for want of a constant."""
    return any(_fails(judge, call, factor) for factor in _PROBES)


def _fails(judge: one_layer.Judge, call: probe.Call, factor: float) -> bool:
    exact = [ops.cast(leaf, "float32") * factor for leaf in call.tensors]
    signature = judge.run.signatures[call.key]
    near = [
        ops.cast(leaf, dtype)
        for leaf, dtype in zip(exact, signature.arguments, strict=True)
    ]
    if not _finite(near):
        return False
    return _finite(judge.exact(call, exact)) and not _finite(
        judge.near(call, near)
    )


def _finite(tensors: list[Any]) -> bool:
    return all(bool(ops.all(ops.isfinite(tensor))) for tensor in tensors)


def _constants(function: Any) -> list[Any]:
    code = getattr(function, "__code__", None)
    if code is None:
        return []
    named = [function.__globals__.get(name) for name in code.co_names]
    return [*code.co_consts, *named]


def _vanishes(value: Any, limits: _formats.Format) -> bool:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    return 0.0 < float(value) <= limits.smallest / 2
