"""The float32 value behind a 16-bit tensor: what it was before it was rounded.

A note on the tensor says what that is: a variable that a layer has read, the
tensor that a layer has cast, or how to compute again what an op has rounded.
Near 0, the derivative of a logarithm, a root or a quotient is unbounded, so
such an op takes that value, and so does a sum with a weight. A note that is not
used costs nothing.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import keras

from tfmix._keras import global_state, layers, tapes
from tfmix._keras import variables as keras_variables
from tfmix.ops import tensors

# A 16-bit tensor carries this note: an `Exact`.
NOTE = "_tfmix_exact"
# Where a value comes from.
OP, INPUT, WEIGHT = "op", "input", "weight"
# A note holds the inputs of this many ops before it. Without a limit, eager
# tensors would never be freed.
_DEEPEST = 6

# The values of one computation, by the `id` of the 16-bit tensor, or of the op.
Known = dict[int, tuple[Any, Any]]


class Exact(NamedTuple):
    """The value of a 16-bit tensor before it was rounded.

    Attributes:
        compute: Takes the known values of other tensors; returns the value.
        origin: `OP`, `INPUT` for a tensor that a layer has cast, `WEIGHT` for
            a float32 variable that a layer reads in 16 bit.
        depth: The number of ops that are computed again for it.
        is_lost: Whether 16 bit loses the value. Then casts and sums use it,
            too; otherwise only ops with an unbounded derivative do.
        is_wide: Whether such an op computed it. Results that use it are then
            computed in float32, up to the next product or larger activations.
        is_exact: Whether it was made only of sums and float32 variables, and so
            is what float32 gives.
        is_product: Whether it multiplies two tensors, element by element. A sum
            of such products uses it.
        multiply: The function that multiplies by a weight; `None` for Keras's.
    """

    compute: Callable[[Known], Any]
    origin: str = OP
    depth: int = 0
    is_lost: bool = True
    is_wide: bool = False
    is_exact: bool = True
    is_product: bool = False
    multiply: Callable | None = None


def note(tensor: Any) -> Exact | None:
    """Returns the note on a tensor, `None` without one."""
    noted: Exact | None = global_state.note(tensor, NOTE)
    return noted


def put(tensor: Any, exact: Exact) -> None:
    """Notes the float32 value of a 16-bit tensor, unless it goes too deep."""
    if exact.depth <= _DEEPEST and tensors.is_16_bit(tensor):
        global_state.put_note(tensor, NOTE, exact)


def keep(rounded: Any, value: Any, **properties: Any) -> None:
    """Keeps the float32 tensor that was rounded to a 16-bit one."""
    if rounded is not value:
        put(rounded, Exact(lambda known: value, **properties))


def weight_copy(weight: Any, copy: Any, multiply: Any = None) -> Any:
    """Notes on a 16-bit copy which float32 weight it is one of."""
    exact = Exact(lambda known: weight, WEIGHT, multiply=multiply)
    global_state.put_note(copy, NOTE, exact)
    return copy


def weight_of(tensor: Any) -> Any:
    """Returns the float32 weight behind a 16-bit copy, `None` without one."""
    noted = note(tensor)
    if noted is None or noted.origin != WEIGHT:
        return None
    return noted.compute({})


def of(tensor: Any, known: Known | None = None) -> Any:
    """Returns the float32 value behind a 16-bit tensor, as exact as is known.

    Anything else is returned unchanged.
    """
    if not tensors.is_16_bit(tensor):
        return tensor
    noted = note(tensor)
    if noted is None or noted.origin == INPUT:
        return tensors.to_float32(tensor)
    known = {} if known is None else known
    if id(tensor) not in known:
        value = by_way_of(tensor, noted.compute(known))
        # It holds the tensor, because the `id` of a freed one is used again.
        known[id(tensor)] = tensor, value
    return known[id(tensor)][1]


def by_way_of(copy: Any, value: Any) -> Any:
    """Returns a float32 value by which its 16-bit copy has a gradient, too.

    A tape in the code of a layer may be asked for that of the copy. JAX knows
    no copy of what it differentiates.
    """
    if keras.backend.backend() != "tensorflow":
        return value
    return tapes.by_way_of(copy, value)


def if_lost(value: Any) -> Any:
    """Returns the float32 value that 16 bit loses, else the argument."""
    noted = note(value)
    if noted is None or noted.origin == INPUT or not noted.is_lost:
        return value
    return of(value)


def is_exact(value: Any) -> bool:
    """Returns whether the known value of a 16-bit tensor is what float32 gives.

    It is if it comes from a variable, or was made only of such values and sums.
    """
    noted = note(value)
    return noted is not None and noted.origin != INPUT and noted.is_exact


def to_float32_with_notes(value: Any) -> Any:
    """Casts a 16-bit tensor to float32 and keeps its mask and its logits.

    Masked metrics and losses of softmax heads need both.
    """
    if not tensors.is_16_bit(value):
        return value
    # A large sum that was computed in float32 is beyond float16.
    result = tensors.to_float32(if_lost(value))
    global_state.copy_notes(value, result, tensors.to_float32)
    return result


def note_cast(source: Any, converted: Any, tensor: Any) -> None:
    """Notes what a layer has cast, and copies the mask of its source."""
    exact = Exact(lambda known: tensor, INPUT)
    global_state.put_note(converted, NOTE, exact)
    layers.copy_mask(source, converted)  # Keras 3.12 loses it in a cast


def before_cast(x: Any) -> Any:
    """Returns a tensor as it was before a layer cast it, else the tensor."""
    noted = None
    if keras.ops.is_tensor(x) or isinstance(x, keras.KerasTensor):
        noted = note(x)
    if noted is None or noted.origin != INPUT:
        return x
    original = noted.compute({})
    if not keras.ops.is_tensor(x):
        return original
    # The argument of `call` is the cast.
    found = by_way_of(x, original)
    if found is not original:
        layers.copy_mask(original, found)
    return found


# These convert an input of a layer, by Keras's `convert_input`.


def remember(original: Callable, x: Any, autocast: bool, dtype: str) -> Any:
    """Notes on what a layer casts what it was before."""
    x = keras_variables.unwrap(x)
    tensor = original(x, False, dtype)
    converted = original(tensor, autocast, dtype)
    if converted is not tensor:
        note_cast(x, converted, tensor)
    return converted


def recover(original: Callable, x: Any, autocast: bool, dtype: str) -> Any:
    """Gives a layer what it gets as it was before another layer cast it."""
    exact = before_cast(x)
    converted = original(exact, autocast, dtype)
    if converted is not exact:
        layers.copy_mask(exact, converted)
    return converted


def pass_on(original: Callable, x: Any, autocast: bool, dtype: str) -> Any:
    """Gives a layer, which casts nothing, what it gets as it was before."""
    return original(before_cast(x), False, dtype)


def as_float32_input(value: Any) -> Any:
    """Returns a float tensor in float32, from before a layer's cast if known.

    It keeps its mask and its logits.
    """
    value = before_cast(value)
    if tensors.float_dtype(value) == "float64":
        return keras.ops.cast(value, "float32")
    return to_float32_with_notes(value)


def with_float32_arguments(method: Callable) -> Callable:
    """Returns a method that takes 16-bit tensors in float32, as penalties."""

    @functools.wraps(method)
    def take(self: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = tensors.map_leaves((args, kwargs), to_float32_with_notes)
        return method(self, *args, **kwargs)

    return take
