"""The scripts of this folder: the `main` of a file, or a row of `SCRIPTS`."""

import functools
import pathlib
import runpy

import keras
import numpy as np

HERE = pathlib.Path(__file__).parent
FILES = [
    path
    for path in sorted(HERE.glob("*.py"))
    if not path.stem.startswith(("_", "test"))
]


@functools.cache
def places():
    """Maps the scripts that this backend can run to their files."""
    other = {"tensorflow": "jax", "jax": "tensorflow"}[keras.backend.backend()]
    found = {}
    for path in FILES:
        source = path.read_text()
        if f"import {other}" in source:
            continue
        if "\nSCRIPTS = {" in source:
            found |= dict.fromkeys(runpy.run_path(str(path))["SCRIPTS"], path)
        else:
            found[path.stem] = path
    return found


def train(script, jit=False):
    """Runs a script from its first line on; returns its losses."""
    made = runpy.run_path(str(places()[script]))
    if "SCRIPTS" in made:
        return made["SCRIPTS"][script](jit)
    return made["main"](jit=jit)


def final(losses):
    """Averages a script's last losses, because a single one is noisy."""
    return np.mean(losses[-max(len(losses) // 4, 1) :])


def bounds(in_float32):
    """Returns the lowest and the highest final loss that equals float32's.

    Args:
        in_float32: The final losses of some seeds.
    """
    low, high = min(in_float32), max(in_float32)
    # Three seeds show only a part of the noise, and rounding to 8 bits may
    # change a loss by 1 %.
    noise = high - low + 0.01 * max(abs(low), abs(high))
    return low - noise, high + noise
