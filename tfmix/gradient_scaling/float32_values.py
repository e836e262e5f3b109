"""The float32 value behind a 16-bit tensor that an op has just rounded.

Near 0, the derivative of a logarithm, a root or a quotient has no bound. What
such an op is given must not be rounded to 16 bit on the way, and neither must
the gradient that comes back. So a square, a mean or a sum with a small number
notes on its 16-bit result how the value is computed in float32, and these ops
compute from that. A note costs nothing where nobody asks for it.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import keras

from tfmix._keras import global_state, gradients
from tfmix.gradient_scaling import tensors

# A note keeps what the ops before it were given: of so many, as eager tensors
# would otherwise never be freed.
_DEEPEST = 6

# The values of one computation, by the `id` of the tensor they are behind.
Known = dict[int, tuple[Any, Any]]


class Value(NamedTuple):
    """How the float32 value of a 16-bit tensor is computed.

    Attributes:
        compute: Takes what is known of other tensors; returns the value.
        depth: The number of ops that are computed once more for it.
        is_lost: Whether 16 bit loses it, so that casts and sums ask for it,
            too. Otherwise only ops with an unbounded derivative do.
        is_wide: Whether it came from such an op: what is computed of it is
            computed in float32, until a product uses it.
        is_exact: Whether it is made of sums and of float32 variables only,
            and so is what float32 has.
    """

    compute: Callable[[Known], Any]
    depth: int = 0
    is_lost: bool = True
    is_wide: bool = False
    is_exact: bool = True


def put(tensor: Any, value: Value) -> None:
    """Notes the float32 value of a 16-bit tensor, unless it goes too deep."""
    if value.depth <= _DEEPEST and tensors.is_16_bit(tensor):
        global_state.put_note(tensor, tensors.UNCAST, value)


def keep(rounded: Any, value: Any, **properties: bool) -> None:
    """Keeps a float32 tensor behind the 16-bit one that it was rounded to."""
    if rounded is not value:
        put(rounded, Value(lambda known: value, **properties))


def find(values: Iterable[Any]) -> list[Value]:
    """Returns the notes on arguments of an op, also on lists of tensors."""
    found = []
    for value in values:
        if isinstance(value, list | tuple):
            found += find(value)
        elif hasattr(value, "shape") and not isinstance(
            value, keras.KerasTensor
        ):
            note = global_state.note(value, tensors.UNCAST)
            if isinstance(note, Value):
                found.append(note)
    return found


def of(tensor: Any, known: Known | None = None) -> Any:
    """Returns the float32 value behind a 16-bit tensor, `None` without one."""
    note = global_state.note(tensor, tensors.UNCAST)
    if not isinstance(note, Value):
        return None
    known = {} if known is None else known
    if id(tensor) not in known:
        value = note.compute(known)
        if keras.backend.backend() == "tensorflow":
            # A tape of the caller's may watch the 16-bit tensor alone.
            value = gradients.by_way_of(tensor, value)
        # With the tensor, whose `id` is another one's once it is freed.
        known[id(tensor)] = tensor, value
    return known[id(tensor)][1]
