"""The float32 value behind a 16-bit tensor that an op has just rounded.

Near 0, the derivative of a logarithm, a root or a quotient is unbounded. The
input of such an op must not be rounded to 16 bit, and neither must the gradient
that comes back. So a square, a mean or a sum with a small number adds a note to
its 16-bit result that says how to compute the value in float32. These ops use
that note. A note that is not used costs nothing.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import keras

from tfmix._keras import global_state, gradients
from tfmix.ops import tensors

# A note holds the inputs of this many ops before it. Without a limit, eager
# tensors would never be freed.
_DEEPEST = 6

# The values of one computation, by the `id` of the 16-bit tensor.
Known = dict[int, tuple[Any, Any]]


class Value(NamedTuple):
    """Computes the float32 value of a 16-bit tensor.

    Attributes:
        compute: Takes the known values of other tensors; returns the value.
        depth: The number of ops that are computed again for it.
        is_lost: Whether 16 bit loses the value. Then casts and sums use it,
            too; otherwise only ops with an unbounded derivative do.
        is_wide: Whether such an op computed it. Results that use it are then
            computed in float32, up to the next product or larger activations.
        is_exact: Whether it was made only of sums and float32 variables, and so
            is what float32 gives.
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
    """Keeps the float32 tensor that was rounded to a 16-bit one."""
    if rounded is not value:
        put(rounded, Value(lambda known: value, **properties))


def find(values: Iterable[Any]) -> list[Value]:
    """Returns the notes on an op's arguments, including lists of tensors."""
    found = []
    for value in values:
        if isinstance(value, list | tuple):
            found += find(value)
        elif not isinstance(value, keras.KerasTensor):
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
            # A caller's tape may watch only the 16-bit tensor.
            value = gradients.by_way_of(tensor, value)
        # It holds the tensor, because the `id` of a freed one is used again.
        known[id(tensor)] = tensor, value
    return known[id(tensor)][1]
