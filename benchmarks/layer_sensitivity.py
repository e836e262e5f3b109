"""How far float32 itself moves when what a layer is given is rounded.

What exceeds the sweep's bound under tfmix is listed with a reason. One is
that the layer magnifies the rounding which inputs and weights get on their
way into 16 bit, however exactly it computes behind that. This measures it.
"""

from typing import Any

import keras
import numpy as np

from benchmarks import layer_deviation, layer_measure
from tfmix import _formats

# Roundings are as good as random: the worst of a few draws is taken.
_DRAWS = 8


def of(
    runs: layer_measure.Runs, fmt: str, kind: str
) -> layer_deviation.Deviation:
    """Compares float32 with float32 on inputs and weights slightly moved.

    Args:
        runs: Of the recipe.
        fmt: The format whose rounding moves them: `"float16"` or `"bfloat16"`.
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
    """Moves each number as far as rounding it to the format may."""
    rng = np.random.default_rng(seed)
    half = _formats.limits(fmt).epsilon / 2

    def move(array: np.ndarray) -> np.ndarray:
        if array.dtype.kind != "f":
            return array
        part = rng.choice([-half, half], array.shape)
        return (array * (1 + part)).astype("float32")

    return keras.tree.map_structure(move, arrays)
