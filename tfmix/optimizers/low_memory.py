"""`LowMemoryOptimizer` keeps the state of its inner optimizer in 8 bits."""

from typing import Any

import keras

from tfmix._keras import variables
from tfmix.optimizers import eight_bit_slots, sixteen_bit_optimizer


class _NoFloat32Weights(sixteen_bit_optimizer.Float32Weights):
    """Passes the model's own variables to the inner optimizer."""

    def make_one(self, variable: keras.Variable) -> keras.Variable:
        raise ValueError(
            "LowMemoryOptimizer is for float32 variables. Received: "
            f"variable {variable.path!r} of dtype {variable.dtype!r}. For "
            "a model in pure 16 bit write MasterWeightOptimizer(optimizer, "
            "slot_dtype='int8') or BFloat16Optimizer(optimizer, "
            "slot_dtype='int8')."
        )


@keras.saving.register_keras_serializable(package="tfmix")
class LowMemoryOptimizer(sixteen_bit_optimizer.SixteenBitOptimizer):
    """Keeps the state of an optimizer in 8 bits instead of 32.

    Use it for models with float32 variables, including mixed precision. For
    pure 16-bit models, set `slot_dtype` of `MasterWeightOptimizer` or
    `BFloat16Optimizer` instead. Both moments of Adam take 2.03 bytes per
    weight instead of 8. Each number is an 8-bit float, signed for means and
    unsigned for second moments, in blocks that share a scale (after arXiv
    2110.02861, which uses a table of codes). A block is one row of a kernel, or
    its fewest last axes with 256 numbers. A step computes in float32, rounds
    its new state stochastically, and updates weights from the rounded state.
    (A second moment moves by 0.1 % a step, which rounding to nearest would
    drop.)

    Args:
        inner_optimizer: One of Keras's optimizers, its name or config. Its
            moments must have the shapes of the variables, and its class must
            not have an `update_step` of its own.
        slot_dtype: `"int8"`, or a list of pairs of a regular expression,
            searched in the variable's path, and `"int8"` or `"float32"`. The
            first match counts; variables without one keep float32. (Leave the
            model's name out of patterns: a loaded `Sequential` does not have
            it in its paths.) State from which weights are computed in each
            step stays in float32: ScheduleFreeAdamW's momentum, Ftrl's
            `linear`. Defaults to `"int8"`: all state except that of variables
            with fewer than 4096 elements, which would save little, and of
            embeddings, whose rare rows have gradients of other sizes.
        seed: Integer of 31 bits that decides the stochastic rounding.
            Defaults to `None`: drawn from Python's `random`, which
            `keras.utils.set_random_seed` seeds.
        name: String. Defaults to the snake-case class name.

    Raises:
        ValueError: If an argument is wrong or, when built, if a variable is
            16-bit, a moment does not have the shape of its variable, the class
            is not Keras's, or the optimizer is `RMSprop(centered=True)`, whose
            moments depend on each other.
        TypeError: If `inner_optimizer` is not an optimizer, or `seed` not an
            integer.

    Examples:
        >>> dense = keras.layers.Dense(64)
        >>> dense.build((None, 64))
        >>> optimizer = LowMemoryOptimizer(keras.optimizers.Adam(1e-3))
        >>> optimizer.build(dense.trainable_variables)
        >>> moments = [v for v in optimizer.variables if "int8" in v.dtype]
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

    def make_float32_weights(
        self, model_variables: variables.Variables
    ) -> sixteen_bit_optimizer.Float32Weights:
        """Creates no float32 weights; see `SixteenBitOptimizer`."""
        return _NoFloat32Weights(self, model_variables)
