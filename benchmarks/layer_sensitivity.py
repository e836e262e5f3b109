"""Measures how much a float32 result changes if its inputs are rounded.

Layers that exceed the sweep's bound under tfmix are listed with a reason. One
reason is that a layer magnifies the rounding of inputs and weights to 16 bit,
even if it computes exactly after that. This module measures that effect.
"""

from typing import Any

import keras
import numpy as np

from benchmarks import layer_deviation, layer_measure
from tfmix import _formats

# Roundings are random, so the worst of a few draws is taken.
_DRAWS = 8


def of(
    runs: layer_measure.Runs, fmt: str, kind: str
) -> layer_deviation.Deviation:
    """Compares float32 with float32 on slightly changed inputs and weights.

    Args:
        runs: The runs of the recipe.
        fmt: The format of the rounding: `"float16"` or `"bfloat16"`.
        kind: A key of `layer_measure.KINDS`.

    Returns:
        The largest deviation of some draws, in epsilons of the format.
    """
    with layer_measure.keras_policy("float32"):
        inputs, weights, run = runs.float32_run(fmt, kind)
        reference = run(inputs, weights)
        found = [
            layer_deviation.compare(
                run(*_moved((inputs, weights), fmt, seed)), reference, fmt
            )
            for seed in range(_DRAWS)
        ]
    return max(found, key=lambda deviation: deviation.epsilons)


def _moved(arrays: Any, fmt: str, seed: int) -> Any:
    """Changes each number by the largest rounding of the format."""
    rng = np.random.default_rng(seed)
    half = _formats.limits(fmt).epsilon / 2

    def move(array: np.ndarray) -> np.ndarray:
        if array.dtype.kind != "f":
            return array
        part = rng.choice([-half, half], array.shape)
        return (array * (1 + part)).astype("float32")

    return keras.tree.map_structure(move, arrays)
