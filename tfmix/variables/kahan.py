"""Kahan summation: a bfloat16 variable and the error of its rounding."""

from typing import Any

from keras import ops

from tfmix.variables import bits, view, views


class KahanView(view.Float32View):
    """A bfloat16 variable and, in bfloat16, what its rounding lost.

    Args:
        variable: The model's bfloat16 variable.
        rest: Bfloat16 variable of the same shape.
    """

    def __init__(self, variable: Any, rest: Any) -> None:
        super().__init__(variable)
        self.rest = rest

    def load(self) -> Any:
        """Returns the float32 value as a tensor."""
        return ops.add(
            ops.cast(self.stored, "float32"), ops.cast(self.rest, "float32")
        )

    def store(self, value: Any) -> None:
        """Keeps a float32 tensor, to about 16 bits."""
        # Rounded by its bits: XLA may take a cast to bfloat16 and back for
        # the identity, and the error for zero.
        upper, _ = bits.split(value)
        rounded = bits.join(upper, ops.zeros(self._shape, "int16"))
        error = ops.where(
            ops.isfinite(rounded),
            ops.subtract(value, rounded),
            ops.zeros_like(value),
        )
        self.stored.assign(upper)
        self.rest.assign(ops.cast(error, "bfloat16"))


class KahanSummation(views.Views):
    """Carries the rounding error of every bfloat16 variable to the next step.

    Args:
        optimizer: The wrapper that owns the errors.
        variables: The model's variables, in order.
    """

    def make_view(self, optimizer: Any, variable: Any) -> KahanView:
        """Creates the view of one bfloat16 variable and its error."""
        rest = optimizer.add_companion(variable, "bfloat16", "compensation")
        return KahanView(variable, rest)
