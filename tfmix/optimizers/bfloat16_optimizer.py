"""Trains bfloat16 variables without masters, by stochastic rounding."""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
from keras import ops

from tfmix._keras import kernels, replacing, variables
from tfmix.optimizers import bits, sixteen_bit_optimizer

# A step may assign a variable more than once (weight decay, then the update,
# then a constraint), and each assignment needs its own random bits.
ASSIGNMENTS_PER_STEP = 16


def stochastic(value: Any, noise: Any) -> Any:
    """Rounds float32 to bfloat16, up or down at random, and keeps the mean.

    Args:
        value: Float32 tensor. Numbers that bfloat16 can hold, infinities and
            NaN stay.
        noise: Int32 tensor of the same shape; see `noise.noise`.
    """
    word = kernels.bitcast(bits.quiet(value), "int32")
    word = word + bits.upper(noise, 16)
    upper = ops.cast(bits.upper(word, 16), "uint16")
    return kernels.bitcast(upper, "bfloat16")


class _StochasticView(variables.Float32View):
    """A bfloat16 variable that rounds assigned values stochastically."""

    def __init__(self, variable: Any, stream: int, draw: Any) -> None:
        super().__init__(variable)
        self.stream = stream * ASSIGNMENTS_PER_STEP
        self.draw, self.assignments = draw, 0

    def load(self) -> Any:
        return ops.cast(self.stored, "float32")

    def store(self, value: Any) -> None:
        noise = self.draw(self.shape, self.stream + self.assignments)
        self.assignments += 1
        self.stored.assign(stochastic(value, noise))


@keras.saving.register_keras_serializable(package="tfmix")
class BFloat16Optimizer(sixteen_bit_optimizer.SixteenBitOptimizer):
    """Updates bfloat16 variables without float32 masters.

    Use it where memory counts more than the last digits. Rounding to nearest
    drops every update smaller than half a step of the format (1/256 of the
    weight). Stochastic rounding keeps updates in the mean (arXiv 2010.06192).
    The inner optimizer computes in float32. For the results of float32 updates
    use `MasterWeightOptimizer(inner)`.

    Args:
        inner_optimizer: A `keras.optimizers.Optimizer`, its name or config. In
            a `LowMemoryOptimizer` it keeps its state in 8 bits.
        seed: Integer of 31 bits that decides the stochastic rounding.
            Defaults to `None`: drawn from Python's `random`, which
            `keras.utils.set_random_seed` seeds.
        name: String. Defaults to the snake-case class name.

    Raises:
        ValueError: If an argument is wrong or, when built, if a variable is
            float16.
        TypeError: If `inner_optimizer` is not an optimizer, or `seed` not an
            integer.

    Examples:
        >>> weight = keras.Variable(keras.ops.ones(4096, "bfloat16"))
        >>> sgd = keras.optimizers.SGD(0.001)
        >>> optimizer = BFloat16Optimizer(sgd, seed=1)
        >>> for _ in range(8):
        ...     optimizer.apply([keras.ops.ones(4096, "bfloat16")], [weight])
        >>> mean = keras.ops.mean(keras.ops.cast(weight, "float32"))
        >>> round(float(mean), 3)
        0.992
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

    def make_float32(self, variable: keras.Variable) -> _StochasticView:
        """Creates a view; see `SixteenBitOptimizer`."""
        dtype = keras.backend.standardize_dtype(variable.dtype)
        if dtype != "bfloat16":
            raise ValueError(
                "BFloat16Optimizer rounds to bfloat16; updates of float16 "
                f"variables need float32 masters. Received: variable "
                f"{variable.path!r} of dtype {dtype!r}. Use the policy "
                "'bfloat16', or MasterWeightOptimizer(optimizer) for float16."
            )
        stream = len(self._pairs) + 1
        return _StochasticView(variable, stream, self.draw_noise)

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """Makes the inner optimizer place its state beside the variables."""
        with contextlib.ExitStack() as undo:
            for _, view in self._pairs.values():
                replacing.swap(undo, view, "colocating", True)
            yield

    def refresh(self) -> None:
        """Starts the streams of random bits again, for a new step."""
        for _, view in self._pairs.values():
            view.assignments = 0
