"""How far the tensors of a 16-bit run are from those of a float32 run."""

import dataclasses

import numpy as np

from tfmix import _formats

# Relative error a result may have, in units of the format's epsilon.
BOUNDS = {"float16": 16.0, "bfloat16": 8.0}
SMALLEST = 2.0**-14


@dataclasses.dataclass(frozen=True)
class Deviation:
    """How far a 16-bit run is from float32.

    Attributes:
        epsilons: The largest error, in units of the format's epsilon:
            `max|a - b| / max(max|b|, 2**-14)` over the entries whose float32
            value `b` is inside the format's range. `max|b|` is taken over
            all outputs, over the gradients of all inputs, or over those of
            all weights: the gradient of a key's bias is zero but for
            rounding, and has no scale of its own. The gradient from above
            is of size 1; what is smaller than 2**-14, float16's smallest
            normal number, is the loss scale's business.
        not_finite: How many entries are not finite where `b` is in range.
        worst: Name of the tensor that is furthest out.
        error: What was raised instead, `""` if nothing was.
    """

    epsilons: float = 0.0
    not_finite: int = 0
    worst: str = ""
    error: str = ""

    def is_within(self, bound: float) -> bool:
        """Says whether a run came through, finite and inside the bound."""
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
    limits = _formats.limits(fmt)
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
    """Names what a tensor's error is measured by; see `Deviation`."""
    return (
        " ".join(name.split()[:2])
        if name.startswith("d input")
        else name.split()[0]
    )
