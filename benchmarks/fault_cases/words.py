"""Inspects and describes the state that a run has left."""

import contextlib
import logging
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import ml_dtypes
import numpy as np

from benchmarks.fault_cases.record import Outcome


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """Yields the warnings in a block, of Python and of tfmix."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("absl")
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield said
        said.extend(str(each.message) for each in caught)
    finally:
        logger.removeHandler(handler)


def to_numpy(value: Any) -> np.ndarray:
    """Copies a tensor or variable to the host."""
    return np.array(keras.ops.convert_to_numpy(value), copy=True)


def snapshot(variables: Iterable[Any]) -> list[np.ndarray]:
    """Copies variables for a later comparison."""
    return [to_numpy(variable) for variable in variables]


def finite(variables: Iterable[Any]) -> bool:
    """Returns whether no variable holds a NaN or an infinity."""
    return all(np.isfinite(value).all() for value in snapshot(variables))


def same(left: Iterable[Any], right: Iterable[Any]) -> bool:
    """Returns whether two lists of arrays have the same bits."""
    pairs = list(zip(left, right, strict=True))
    return all(
        np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs
    )


def close(variable: Any, expected: Any) -> bool:
    """Returns whether a variable holds numbers, up to its precision."""
    steps = ml_dtypes.finfo(to_numpy(variable).dtype).eps
    got = to_numpy(variable).astype("float64")
    # The tolerance is doubled, because stochastic rounding may go either way.
    return bool(np.allclose(got, expected, rtol=max(2 * float(steps), 1e-5)))


def weight_is(
    variable: Any, right: list[float], more: str = "", others: bool = True
) -> Outcome:
    """Returns the outcome of a run that must end with a weight.

    Args:
        variable: The trained variable.
        right: Its right value, by which the run survives.
        more: Further observations.
        others: Whether these are right.
    """
    text = f"weight {vector(variable)} (right: {vector(right)})"
    return Outcome(
        bool(others) and close(variable, right),
        ", ".join(filter(None, [text, more])),
    )


def weights(variables: Iterable[Any]) -> str:
    """Describes the state of a model's weights."""
    values = np.concatenate([v.ravel() for v in snapshot(variables)])
    if np.isnan(values).any():
        return f"{np.isnan(values).sum()} of {values.size} weights NaN"
    if np.isinf(values).any():
        return f"{np.isinf(values).sum()} of {values.size} weights infinite"
    return "weights finite"


def vector(variable: Any) -> str:
    """Writes a short vector."""
    numbers = (f"{float(n):.4g}" for n in to_numpy(variable).ravel())
    return f"[{' '.join(numbers)}]"


def scale(optimizer: Any) -> float:
    """Returns the stored loss scale of either system's optimizer."""
    return float(to_numpy(optimizer.dynamic_scale))


def skipped(optimizer: Any, steps: int) -> int:
    """Returns the number of skipped steps, which Keras does not count."""
    return steps - int(to_numpy(optimizer.iterations))


def progress(optimizer: Any, steps: int) -> str:
    """Describes the number of skipped steps, and the scale."""
    count = skipped(optimizer, steps)
    return f"{count} of {steps} steps skipped, scale {scale(optimizer):g}"
