"""Measures the deviation of a 16-bit run from a float32 run."""

import dataclasses

import numpy as np

from tfmix import _formats

# The allowed relative errors of results, in units of the format's epsilon.
BOUNDS = {"float16": 16.0, "bfloat16": 8.0}
SMALLEST = 2.0**-14


@dataclasses.dataclass(frozen=True)
class Deviation:
    """The deviation of a 16-bit run from float32.

    Attributes:
        epsilons: The largest error, in units of the format's epsilon:
            `max|a - b| / max(max|b|, 2**-14)` over the entries whose float32
            value `b` is inside the format's range. `max|b|` is taken over
            all outputs, over the gradients of all inputs, or over those of
            all weights, because the gradient of a key's bias is only
            rounding noise and has no size. The gradient of the outputs has
            the size 1. Loss scaling takes care of numbers below 2**-14,
            float16's smallest normal number.
        not_finite: The number of bad entries for which `b` is in range.
        worst: The name of the tensor with the largest error.
        error: The exception that was raised, `""` without one.
    """

    epsilons: float = 0.0
    not_finite: int = 0
    worst: str = ""
    error: str = ""

    def is_within(self, bound: float) -> bool:
        """Returns whether a run had no error, was finite and within a bound."""
        return not self.error and not self.not_finite and self.epsilons <= bound

    def __str__(self) -> str:
        if self.error:
            return self.error
        if self.not_finite:
            return f"{self.not_finite} not finite ({self.worst})"
        return f"{self.epsilons:.1f} eps ({self.worst})"


def compare(
    actual: dict[str, np.ndarray], reference: dict[str, np.ndarray], fmt: str
) -> Deviation:
    """Compares the tensors of two runs by name, group by group."""
    limits = _formats.LIMITS[fmt]
    inside = {k: np.abs(b) <= limits.max for k, b in reference.items()}
    sizes: dict[str, float] = {}
    for name, expected in reference.items():
        size = np.max(np.abs(expected[inside[name]]), initial=SMALLEST)
        group = _group(name)
        sizes[group] = max(sizes.get(group, 0.0), float(size))
    worst = Deviation()
    for name, expected in reference.items():
        got, wanted = actual[name][inside[name]], expected[inside[name]]
        finite = np.isfinite(got)
        gap = np.max(np.abs(got - wanted), initial=0.0, where=finite)
        epsilons = float(gap) / sizes[_group(name)] / limits.epsilon
        bad = int(np.sum(~finite))
        if (bad, epsilons) > (worst.not_finite, worst.epsilons):
            worst = Deviation(epsilons, bad, name)
    return worst


def _group(name: str) -> str:
    """Returns the group whose size a tensor is compared with."""
    return (
        " ".join(name.split()[:2])
        if name.startswith("d input")
        else name.split()[0]
    )
