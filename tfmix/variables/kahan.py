"""Kahan summation: a bfloat16 variable and the error of its rounding."""

from typing import Any

from keras import ops

from tfmix.variables import bits, views


class KahanView(views.RestView):
    """A bfloat16 variable and, in bfloat16, what its rounding lost."""

    rest_dtype, rest_name = "bfloat16", "compensation"

    def load(self) -> Any:
        """Returns the float32 value as a tensor."""
        wide = [ops.cast(each, "float32") for each in (self.stored, self.rest)]
        return ops.add(*wide)

    def store(self, value: Any) -> None:
        """Keeps a float32 tensor, to about 16 bits."""
        # Rounded by its bits: XLA may take a cast to bfloat16 and back for
        # the identity, and the error for zero.
        upper, _ = bits.split(value)
        rounded = bits.join(upper, ops.zeros(self.shape, "int16"))
        error = ops.subtract(value, rounded)
        error = ops.where(ops.isfinite(rounded), error, ops.zeros_like(value))
        self.stored.assign(upper)
        self.rest.assign(ops.cast(error, "bfloat16"))


class KahanSummation(views.Views):
    """Carries each rounding error to the next step."""

    view = KahanView
    # Else the lost bits of `SplitMasters`, an integer, might pass for errors.
    salt = 1
