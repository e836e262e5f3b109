"""Split masters: a bfloat16 variable and the 16 bits it lacks."""

from typing import Any

import keras

from tfmix.variables import bits, views


class SplitView(views.RestView):
    """An exact float32 in the model's variable and 16 more bits, an int16."""

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

    only_bfloat16 = (
        "split=True keeps the 16 bits that a bfloat16 lacks to a float32; a "
        "float16 is no part of one"
    )

    def make_view(self, variable: keras.Variable) -> SplitView:
        """Creates the view of one bfloat16 variable and its lower half."""
        rest = self.add_rest(variable, "int16", "lost_bits")
        return SplitView(variable, rest)
