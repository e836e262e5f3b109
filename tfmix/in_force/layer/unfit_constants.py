"""Float constants in the code of a layer that its dtype cannot hold."""

import math
from typing import NamedTuple

import keras

from tfmix import _formats, _users_code
from tfmix.in_force.layer import code_constants

# Code that tells formats apart chooses its constants by them.
_TELLS_APART = frozenset(("float16", "mixed_float16", "finfo"))
# The operation whose gradient is that of x**-0.5, and where it may be computed.
_ROOT, _WIDE = "rsqrt", "float32"


class Misfit(NamedTuple):
    """A constant that a layer's dtype cannot hold."""

    cause: str  # Where it is, and what is wrong with it.
    remedy: str  # What to write.
    is_infinite: bool  # It is too large, not too small.


def unfit(layer: keras.Layer, dtype: str) -> Misfit | None:
    """Says where a layer's code holds a constant that a dtype does not.

    Returns:
        The first; `None` if every constant fits: is not infinite, and not
        zero, if it is not in float32. An epsilon in code that takes reciprocal
        roots fits if their gradient there is finite.
    """
    limits = _formats.limits(dtype)
    for function in code_constants.functions(layer):
        words = code_constants.words(function)
        if _TELLS_APART & words:
            continue
        takes_root = _ROOT in words and _WIDE not in words
        for value, line in code_constants.floats(function, layer):
            size = abs(value)
            # The halves are where rounding to nearest turns.
            if size > limits.max and math.isfinite(size):
                cause = f"{value!r} is infinite"
                such = math.copysign(limits.max / 2, value)
                fits = f"within +-{limits.max:g}, such as {such:.0e}"
            elif 0 < size <= limits.smallest / 2:
                cause = f"{value!r} is 0"
                fits = f"of {limits.smallest:.0e} or more"
            elif takes_root and 0 < size < limits.max ** (-2 / 3):
                cause = f"the gradient of {_ROOT}({value!r}) is infinite"
                fits = f"of {1.1 * limits.max ** (-2 / 3):.0e} or more"
            else:
                continue
            place = _users_code.line_of(function.__code__.co_filename, line)
            return Misfit(
                cause=f"{place}{cause} in {dtype}.",
                remedy=f"take a constant {fits}",
                is_infinite=size > limits.max,
            )
    return None
