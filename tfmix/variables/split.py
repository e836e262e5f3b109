"""Split masters: a bfloat16 variable and the 16 bits it lacks."""

from typing import Any

from tfmix.variables import bits, views


class SplitView(views.RestView):
    """An exact float32 in the model's variable and 16 more bits."""

    rest_dtype, rest_name = "int16", "lost_bits"

    def load(self) -> Any:
        """Returns the float32 value as a tensor."""
        return bits.join(self.stored, self.rest)

    def store(self, value: Any) -> None:
        """Keeps a float32 tensor without loss."""
        upper, lower = bits.split(value)
        self.stored.assign(upper)
        self.rest.assign(lower)


class SplitMasters(views.Views):
    """Keeps the lower half of the master of every bfloat16 variable."""

    view = SplitView
    only_bfloat16 = (
        "split=True keeps the 16 bits that a bfloat16 lacks to a float32; a "
        "float16 is no part of one"
    )
