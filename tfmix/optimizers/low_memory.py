"""The optimizer whose inner optimizer keeps its state in 8 bits."""

from typing import Any

import keras

from tfmix._keras import optimizers, variables
from tfmix.optimizers import eight_bit_slots, sixteen_bit_optimizer


class _Themselves(sixteen_bit_optimizer.StandIns):
    """Lets the inner optimizer update the model's variables."""

    def make(self) -> dict[int, keras.Variable]:
        for variable in self.narrow:
            raise ValueError(
                "LowMemoryOptimizer is for float32 variables. Received: "
                f"variable {variable.path!r} of dtype {variable.dtype!r}. For "
                "a model in pure 16 bit write MasterWeightOptimizer(optimizer, "
                "slot_dtype='int8') or BFloat16Optimizer(optimizer, "
                "slot_dtype='int8')."
            )
        return {}

    def refresh(self) -> None:
        pass

    write_back = refresh


@keras.saving.register_keras_serializable(package="tfmix")
class LowMemoryOptimizer(
    optimizers.AveragesOfInner, sixteen_bit_optimizer.SixteenBitOptimizer
):
    """Keeps the state of an optimizer in 8 bits instead of 32.

    For models with float32 variables, mixed ones among them; those in pure 16
    bit have `slot_dtype` in `MasterWeightOptimizer` and `BFloat16Optimizer`.
    Both moments of Adam take 2.03 bytes a weight instead of 8. Each number is
    an 8-bit float, signed for means, unsigned for second moments, in blocks of
    256 that share a scale (after arXiv 2110.02861, whose code is a table).
    A step computes in float32, rounds stochastically what it stores, and moves
    weights by what is stored. (A second moment moves by 0.1 % a step, which
    rounding to nearest would drop.)

    Args:
        inner_optimizer: A `keras.optimizers.Optimizer`, its name or config.
            Its moments must be shaped like the variables. A class with an
            `update_step` of its own declares those that are never negative,
            which get the code of second moments: `never_negative =
            ("velocity",)`.
        slot_dtype: `"int8"`, or a list of pairs of a pattern, searched in the
            variable's path, and `"int8"` or `"float32"`; the first that fits
            holds, and float32 where none does. (Patterns should leave out the
            model's name: a loaded `Sequential` has none in its paths.) What
            weights are made of anew in each step stays float32:
            ScheduleFreeAdamW's momentum, Ftrl's `linear`. Defaults to
            `"int8"`: all but the state of variables with fewer than 4096
            elements, where there is nothing to save, and of embeddings, whose
            rare rows have gradients of other sizes.
        seed: Integer of 31 bits that decides the stochastic rounding.
            Defaults to `None`: drawn from Python's `random`, which
            `keras.utils.set_random_seed` seeds.
        name: String. Defaults to the snake-case class name.

    Raises:
        ValueError: If an argument is wrong or, when built, if a variable is
            16-bit, a moment is not shaped like its variable, a class does not
            say rightly which are never negative, or the optimizer is
            `RMSprop(centered=True)`, whose moments cannot be rounded apart.
        TypeError: If `inner_optimizer` is no optimizer, or `seed` no integer.

    Examples:
        >>> dense = keras.layers.Dense(64)
        >>> dense.build((None, 64))
        >>> optimizer = LowMemoryOptimizer(keras.optimizers.Adam(1e-3))
        >>> optimizer.build(dense.trainable_variables)
        >>> moments = [v for v in optimizer.variables if v.dtype == "uint8"]
        >>> [tuple(v.shape) for v in moments]
        [(64, 64), (64, 64)]
    """

    def __init__(
        self,
        inner_optimizer: Any,
        slot_dtype: eight_bit_slots.Rules = "int8",
        *,
        seed: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(inner_optimizer, name, slot_dtype, seed)

    def make_stand_ins(
        self, model_variables: variables.Variables
    ) -> sixteen_bit_optimizer.StandIns:
        """Lets variables stand for themselves; see `SixteenBitOptimizer`."""
        return _Themselves(self, model_variables)
