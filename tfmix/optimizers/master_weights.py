"""`MasterWeightOptimizer` keeps float32 masters of 16-bit variables."""

import keras
from keras import ops

from tfmix._keras import optimizers, variables
from tfmix.optimizers import bits, sixteen_bit_optimizer


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
        inner_optimizer: A `keras.optimizers.Optimizer`, its name or config. In
            a `LowMemoryOptimizer` it keeps its state in 8 bits.
        name: String. Defaults to the snake-case class name.

    Raises:
        ValueError: If `inner_optimizer` is built, or scales the loss.
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

    def make_float32(self, variable: keras.Variable) -> keras.Variable:
        """Creates a master; see `SixteenBitOptimizer`."""
        master = optimizers.add_variable(
            self,
            shape=variable.shape,
            initializer=lambda shape, dtype: ops.cast(variable.value, dtype),
            dtype="float32",
            name=variable.name,
            **variables.placement(variable),
        )
        return variables.adopt(master, variable)

    def refresh(self) -> None:
        """Updates masters of variables that were assigned meanwhile."""
        for variable, master in self._pairs.values():
            master.assign(bits.refresh_master(master, variable))

    def write_back(self) -> None:
        """Rounds the masters into the model's variables."""
        for variable, master in self._pairs.values():
            variable.assign(ops.cast(master, variable.dtype))
