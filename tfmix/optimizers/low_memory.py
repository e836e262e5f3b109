"""`LowMemoryOptimizer` keeps the state of its inner optimizer in 8 bits."""

from typing import Any

import keras

from tfmix._keras import variables as keras_variables
from tfmix.optimizers import eight_bit_slots, wrapper


@keras.saving.register_keras_serializable(package="tfmix")
class LowMemoryOptimizer(wrapper.OptimizerWrapper):
    """Keeps the state of an optimizer in 8 bits instead of 32.

    Use it for models with float32 variables, including mixed precision. For
    pure 16-bit models put it inside `MasterWeightOptimizer` or
    `BFloat16Optimizer`. Both moments of Adam take 2.03 bytes per weight instead
    of 8. Each number is an 8-bit float, signed for means and unsigned for
    second moments, in blocks that share a scale (after arXiv 2110.02861, which
    uses a table of codes). A block is a row of a kernel, or its fewest last
    axes with 256 numbers. A step computes in float32, rounds its new state
    stochastically, and updates weights from the rounded state. (A second moment
    moves by 0.1 % a step, which rounding to nearest would drop.)

    Some state stays float32: that of small variables (fewer than 4096 elements,
    or rows of fewer than 32, such as vectors) and of embeddings, whose rare
    rows have gradients of other sizes; state from which weights are computed in
    each step (ScheduleFreeAdamW's momentum, Ftrl's `linear`); and state of
    another shape than its variable's, such as Adafactor's.

    Args:
        inner_optimizer: One of Keras's optimizers, its name or config, whose
            class does not have an `update_step` of its own.
        seed: Integer of 31 bits that decides the stochastic rounding.
            Defaults to `None`: drawn from Python's `random`, which
            `keras.utils.set_random_seed` seeds.
        name: String. Defaults to the snake-case class name.

    Raises:
        ValueError: If an argument is wrong or, when built, if a variable is
            16-bit, the class is not Keras's, or the optimizer is
            `RMSprop(centered=True)`, whose moments depend on each other.
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
        *,
        seed: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(inner_optimizer, name)
        self._add_seed(seed)

    def build_inner(self, variables: keras_variables.Variables) -> None:
        """Builds the inner optimizer with 8-bit state."""
        for variable in filter(keras_variables.is_sixteen_bit, variables):
            raise ValueError(
                "LowMemoryOptimizer is for float32 variables. Received: "
                f"variable {variable.path!r} of dtype {variable.dtype!r}. For "
                "a model in pure 16 bit write MasterWeightOptimizer("
                "LowMemoryOptimizer(optimizer)) or BFloat16Optimizer("
                "LowMemoryOptimizer(optimizer))."
            )
        with eight_bit_slots.creating(self.inner_optimizer, self.draw_noise):
            self.inner_optimizer.build(variables)
