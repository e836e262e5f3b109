"""`MasterWeightOptimizer` keeps float32 masters of 16-bit variables."""

from typing import Any

import keras
from keras import ops

from tfmix._keras import optimizers, variables
from tfmix.optimizers import (
    bits,
    eight_bit_slots,
    flat,
    sixteen_bit_optimizer,
)


@keras.saving.register_keras_serializable(package="tfmix")
class MasterWeightOptimizer(sixteen_bit_optimizer.SixteenBitOptimizer):
    """Updates float32 masters and rounds them into 16-bit variables.

    Use it for models whose variables are float16 or bfloat16 (the policies
    `"float16"` and `"bfloat16"`), where an update smaller than half a step of
    the format would be lost. Gradients, masters and state of the inner
    optimizer are all in float32. Its weight decay, clipping, constraints, EMA
    and accumulation act on the masters. Variables that are not 16-bit are
    passed to it unchanged. Put it inside the loss-scale optimizer:
    `LossScaleOptimizer(MasterWeightOptimizer(Adam()))`.

    If you assign weights to the model after the optimizer was built, by
    loading a file for example, the next step updates the masters.

    Args:
        inner_optimizer: A `keras.optimizers.Optimizer`, its name or config.
        flat: Boolean. Joins the masters into one vector per dtype: one update
            instead of one per variable. For element-wise optimizers only, and
            without 8-bit state.
            Defaults to `False`.
        slot_dtype: `"float32"`, or `"int8"` or a list of rules, as in
            `LowMemoryOptimizer`. Defaults to `"float32"`.
        seed: Integer of 31 bits that decides how 8-bit state is rounded.
            Defaults to `None`: drawn from Python's `random`.
        name: String. Defaults to the snake-case class name.

    Raises:
        ValueError: If an argument is wrong or, when built, if `flat` does not
            fit the optimizer or the variables.
        TypeError: If `inner_optimizer` is not an optimizer.

    Examples:
        >>> weight = keras.Variable([1.0], dtype="bfloat16")
        >>> sgd = keras.optimizers.SGD(0.001)
        >>> optimizer = MasterWeightOptimizer(sgd)
        >>> for _ in range(8):
        ...     optimizer.apply([keras.ops.ones(1, "bfloat16")], [weight])
        >>> float(weight[0])
        0.9921875
    """

    # This is a class attribute, so that setting it does not reach an inner
    # optimizer with an attribute of the same name.
    flat = False

    def __init__(
        self,
        inner_optimizer: Any,
        *,
        flat: bool = False,
        slot_dtype: eight_bit_slots.Rules = "float32",
        seed: int | None = None,
        name: str | None = None,
    ) -> None:
        if not isinstance(flat, bool):
            raise TypeError(
                f"`flat` must be True or False. Received: flat={flat!r}."
            )
        if flat and slot_dtype != "float32":
            raise ValueError(
                "flat=True joins variables, and 8-bit state is chosen for each "
                f"of them. Received: flat=True, slot_dtype={slot_dtype!r}. "
                "Leave out one of the two."
            )
        super().__init__(inner_optimizer, name, slot_dtype, seed)
        self.flat = flat

    def make_float32_weights(
        self, model_variables: sixteen_bit_optimizer.Variables
    ) -> sixteen_bit_optimizer.Float32Weights:
        """Creates the masters; see `SixteenBitOptimizer`."""
        kind = flat.FlatMasters if self.flat else _PerVariableMasters
        return kind(self, model_variables)

    def get_config(self) -> dict:
        """Returns the settings `from_config` needs."""
        return super().get_config() | {"flat": self.flat}


class _PerVariableMasters(sixteen_bit_optimizer.Float32Weights):
    """Keeps a float32 variable behind every 16-bit one."""

    def make_one(self, variable: keras.Variable) -> keras.Variable:
        master = optimizers.add_variable(
            self.optimizer,
            shape=variable.shape,
            initializer=lambda shape, dtype: ops.cast(variable.value, dtype),
            dtype="float32",
            name=variable.name,
            **variables.placement(variable),
        )
        return variables.adopt(master, variable)

    def refresh(self) -> None:
        for variable in self.narrow:
            master = self.target(variable)
            master.assign(bits.refresh_master(master, variable))

    def write_back(self) -> None:
        for variable in self.narrow:
            variable.assign(ops.cast(self.target(variable), variable.dtype))
