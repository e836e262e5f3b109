"""Training bfloat16 variables without float32 masters."""

import random
from typing import Any

import keras

from tfmix.variables import base, kahan, stochastic

ROUNDINGS = {
    "stochastic": stochastic.StochasticRounding,
    "kahan": kahan.KahanSummation,
}


@keras.saving.register_keras_serializable(package="tfmix")
class BFloat16Optimizer(base.SixteenBitOptimizer):
    """Updates bfloat16 variables without float32 masters.

    Use it where memory counts more than the last digits. Rounding to nearest
    drops every update smaller than half a step of the format (1/256 of the
    weight). Stochastic rounding keeps updates in the mean; Kahan summation
    carries what was dropped to the next step (arXiv 2010.06192). The inner
    optimizer computes in float32.

    Args:
        inner_optimizer: A `keras.optimizers.Optimizer`, its name or config.
        rounding: `"stochastic"` (2 bytes per weight) or `"kahan"` (4 bytes).
            Defaults to `"stochastic"`.
        seed: Integer of 31 bits that decides the stochastic rounding.
            Defaults to `None`: drawn from Python's `random`, which
            `keras.utils.set_random_seed` seeds.
        slot_dtype: `"float32"`, or `"bfloat16"` to store the inner
            optimizer's slots in bfloat16, too, rounded stochastically; only
            with `rounding="stochastic"`. Defaults to `"float32"`.
        name: String. Defaults to the snake-case class name.

    Raises:
        ValueError: If an argument is wrong or, when built, if a variable is
            float16.
        TypeError: If `inner_optimizer` is no optimizer, or `seed` no integer.

    Example:
        >>> weight = keras.Variable([1.0], dtype="bfloat16")
        >>> sgd = keras.optimizers.SGD(0.001)
        >>> optimizer = BFloat16Optimizer(sgd, rounding="kahan")
        >>> for _ in range(8):
        ...     optimizer.apply([keras.ops.ones(1, "bfloat16")], [weight])
        >>> float(weight[0])
        0.9921875
    """

    # Declared, so that an inner optimizer's of the same name is left alone.
    rounding = slot_dtype = ""
    seed: int | None = None
    seed_variable: keras.Variable | None = None

    def __init__(
        self,
        inner_optimizer: Any,
        *,
        rounding: str = "stochastic",
        seed: int | None = None,
        slot_dtype: str = "float32",
        name: str | None = None,
    ) -> None:
        if rounding not in ROUNDINGS:
            raise ValueError(
                f"`rounding` must be one of {sorted(ROUNDINGS)}. "
                f"Received: rounding={rounding!r}."
            )
        if seed is not None and rounding != "stochastic":
            raise ValueError(
                f"rounding={rounding!r} draws no random numbers. "
                f"Received: seed={seed!r}. Leave `seed` out."
            )
        if slot_dtype not in ("float32", "bfloat16"):
            raise ValueError(
                "`slot_dtype` must be 'float32' or 'bfloat16'. "
                f"Received: slot_dtype={slot_dtype!r}."
            )
        if slot_dtype == "bfloat16" and rounding != "stochastic":
            raise ValueError(
                "bfloat16 slots are rounded stochastically. Received: "
                f"slot_dtype={slot_dtype!r}, rounding={rounding!r}. Use "
                "rounding='stochastic' or slot_dtype='float32'."
            )
        super().__init__(inner_optimizer, name=name)
        self.rounding, self.slot_dtype = rounding, slot_dtype
        self.seed = _checked_seed(seed) if rounding == "stochastic" else None
        if self.seed is not None:
            # In a variable, so that a checkpoint continues the same numbers.
            self.seed_variable = self.add_variable(
                shape=(),
                initializer=keras.initializers.Constant(self.seed),
                dtype="int32",
                aggregation="only_first_replica",
                name="seed",
            )

    def make_stand_ins(self, model_variables: base.Variables) -> base.StandIns:
        """Creates the views; see `SixteenBitOptimizer`."""
        return ROUNDINGS[self.rounding](self, model_variables)

    def get_config(self) -> dict:
        """Returns the settings `from_config` needs."""
        names = "rounding", "seed", "slot_dtype"
        return super().get_config() | {n: getattr(self, n) for n in names}


def _checked_seed(seed: int | None) -> int:
    """Returns a seed of 31 bits, drawn if none is given."""
    if seed is None:
        return random.randrange(2**31)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(
            f"`seed` must be an integer or None. Received: seed={seed!r}."
        )
    if not 0 <= seed < 2**31:
        raise ValueError(
            f"`seed` must lie from 0 to 2**31 - 1. Received: seed={seed!r}."
        )
    return seed
