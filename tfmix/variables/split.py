"""Split masters: a bfloat16 variable and the 16 bits it lacks."""

from collections.abc import Sequence
from typing import Any

from tfmix.variables import bits, view, views


class SplitView(view.Float32View):
    """An exact float32 in the model's variable and 16 more bits.

    Args:
        variable: The model's bfloat16 variable.
        rest: Int16 variable of the same shape.
    """

    def __init__(self, variable: Any, rest: Any) -> None:
        super().__init__(variable)
        self.rest = rest

    def load(self) -> Any:
        """Returns the float32 value as a tensor."""
        return bits.join(self.stored, self.rest)

    def store(self, value: Any) -> None:
        """Keeps a float32 tensor without loss."""
        upper, lower = bits.split(value)
        self.stored.assign(upper)
        self.rest.assign(lower)


class SplitMasters(views.Views):
    """Keeps the lower half of the master of every bfloat16 variable.

    Args:
        optimizer: The wrapper that owns the halves.
        variables: The model's variables, in order.

    Raises:
        ValueError: If a variable is float16.
    """

    def __init__(self, optimizer: Any, variables: Sequence) -> None:
        views.check_bfloat16(
            variables,
            "split=True keeps the 16 bits that a bfloat16 lacks to a float32; "
            "a float16 is no part of one",
        )
        super().__init__(optimizer, variables)

    def make_view(self, optimizer: Any, variable: Any) -> view.Float32View:
        """Creates the view of one bfloat16 variable and its lower half."""
        rest = optimizer.add_companion(variable, "int16", "lost_bits")
        return SplitView(variable, rest)
