"""Which optimizers and variables may be updated as parts of one vector."""

import math
from collections.abc import Sequence
from typing import Any

import keras

from tfmix._keras import optimizers

# Optimizers whose update of an element reads that element alone, by the
# `update_step` they run (so subclasses that keep it count too).
ELEMENTWISE = (
    "SGD",
    "Adam",
    "AdamW",
    "Adamax",
    "Adagrad",
    "Adadelta",
    "RMSprop",
    "Nadam",
    "Ftrl",
    "Lion",
    "ScheduleFreeAdamW",  # Keras 3.13 and newer
)
# Those that raise to a power, or divide by a square root, which TensorFlow's
# graph optimizer turns into a product with `rsqrt`. Its kernels compute both
# to the last bit in one way in whole SIMD registers and in another in what is
# left beyond them; other operations are exact either way.
UNEVEN = ("Adadelta", "Adagrad", "Ftrl", "RMSprop")
# Floats in the widest register there is, AVX-512's.
REGISTER = 16
REFUSED = {
    "Lamb": "it scales each variable's update by that variable's norm",
    "Muon": "it orthogonalises each weight matrix",
    "Adafactor": "it keeps row and column statistics of each weight matrix",
    "MultiOptimizer": "it chooses an optimizer for each variable",
}


def check_optimizer(optimizer: Any) -> None:
    """Refuses an optimizer that must see each variable apart.

    Args:
        optimizer: The inner optimizer.

    Raises:
        ValueError: If its update of one element depends on others, or cannot
            be known not to.
    """
    name = type(optimizer).__name__
    for base, reason in REFUSED.items():
        known = getattr(keras.optimizers, base, None)
        if known is not None and isinstance(optimizer, known):
            raise ValueError(
                f"flat=True cannot run {name}: {reason}. Received: "
                f"inner_optimizer={optimizer.name!r}. Use flat=False."
            )
    if optimizer.clipnorm is not None:
        raise ValueError(
            "flat=True cannot run clipnorm, which clips each variable's "
            f"gradient by its own norm. Received: clipnorm="
            f"{optimizer.clipnorm!r}. Use global_clipnorm, clipvalue or "
            "flat=False."
        )
    if not _runs_elementwise_update(optimizer):
        raise ValueError(
            f"flat=True needs an element-wise optimizer: {list(ELEMENTWISE)}, "
            f"or a class that says so with `elementwise = True`. Received: "
            f"inner_optimizer={optimizer.name!r} of type {name}. Use "
            "flat=False."
        )


def check_variables(variables: Sequence) -> None:
    """Refuses variables that cannot be parts of one vector.

    Args:
        variables: The model's variables.

    Raises:
        ValueError: If a 16-bit variable has a constraint or is sharded.
    """
    for variable in filter(optimizers.is_sixteen_bit, variables):
        if variable.constraint is not None:
            raise ValueError(
                "flat=True cannot apply the constraint of one variable to a "
                f"part of a vector. Received: variable {variable.path!r} with "
                f"constraint={variable.constraint!r}. Use flat=False."
            )
    distribution = keras.distribution.distribution()
    if isinstance(distribution, keras.distribution.ModelParallel):
        raise ValueError(
            "flat=True cannot join variables that are sharded differently. "
            f"Received: distribution={distribution!r}. Use flat=False."
        )


def must_stay_alone(optimizer: Any, variable: Any) -> bool:
    """Says whether joining a variable to others would change its last bits.

    Args:
        optimizer: The inner optimizer.
        variable: The model's variable.

    Returns:
        True for a variable that leaves a register partly filled under an
        optimizer whose result depends on it. The answer is the same on every
        backend, so that a checkpoint fits all of them.
    """
    size = math.prod(variable.shape)
    return bool(size % REGISTER) and _runs_update_of(optimizer, UNEVEN)


def _runs_elementwise_update(optimizer: Any) -> bool:
    if getattr(type(optimizer), "elementwise", False):
        return True
    return _runs_update_of(optimizer, ELEMENTWISE)


def _runs_update_of(optimizer: Any, names: Sequence[str]) -> bool:
    known = [getattr(keras.optimizers, name, None) for name in names]
    return type(optimizer).update_step in [
        cls.update_step for cls in known if cls is not None
    ]
