"""Float32 views of bfloat16 variables, which the inner optimizer updates."""

import contextlib
from collections.abc import Iterator

import keras

from tfmix._keras import replacing
from tfmix.optimizers import sixteen_bit_optimizer


class Views(sixteen_bit_optimizer.StandIns):
    """Makes the inner optimizer update float32 views of bfloat16 variables."""

    # The message about a float16 variable opens with this reason.
    only_bfloat16: str

    def make(self) -> dict[int, keras.Variable]:
        """Creates the views."""
        for variable in self.narrow:
            dtype = keras.backend.standardize_dtype(variable.dtype)
            if dtype != "bfloat16":
                raise ValueError(
                    f"{self.only_bfloat16}. Received: variable "
                    f"{variable.path!r} of dtype {dtype!r}. Use the policy "
                    "'bfloat16', or MasterWeightOptimizer(optimizer) for "
                    "float16."
                )
        return super().make()

    @contextlib.contextmanager
    def creating_slots(self) -> Iterator[None]:
        """Makes the inner optimizer place its state beside the variables."""
        with contextlib.ExitStack() as undo:
            for view in self.stand_ins.values():
                replacing.swap(undo, view, "colocating", True)
            yield
