"""What multiplies by a weight, where something was chosen to: the one hook."""

from collections.abc import Callable
from typing import Any

import keras

from tfmix._keras import layer_policies
from tfmix.gradient_scaling.contraction import Contraction

# Takes a 16-bit tensor, the float32 weight and what is summed over; returns
# the product in the dtype of the tensor, or `None` if it has no such form.
Multiply = Callable[[Any, Any, Contraction], Any]

# On a variable.
_CHOSEN = "_tfmix_chosen_product"


def choose(variable: keras.Variable, multiply: Multiply | None) -> None:
    """Lets a function multiply by a variable; `None` ends that."""
    layer_policies.put(variable, _CHOSEN, multiply)


def of(variable: keras.Variable) -> Multiply | None:
    """Returns what was chosen to multiply by a variable."""
    return getattr(variable, _CHOSEN, None)
