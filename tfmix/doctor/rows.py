"""One row of a report, and how it prints."""

import dataclasses

COLUMNS = (
    "layer",
    "phase",
    "verdict",
    "relative error",
    "headroom",
    "what to write",
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One layer in one phase.

    Attributes:
        layer: The layer's name, its path where the name is not unique, or
            `"loss"`.
        phase: `"forward"`: its outputs; `"backward"`: the gradients it
            computes, of its inputs and weights; `"weights"`: their values.
        verdict: `"ok"`, `"overflow"`, `"underflow"`, `"inaccurate"` or
            `"not_finite"`.
        relative_error: Norm of the error that this layer alone makes in 16
            bit, over the norm of the float32 result.
        headroom_bits: How often the result can be doubled before it leaves
            the format; negative if it has left it.
        advice: The line of code that mends it; empty for most healthy rows.
        gradient_cosine: Cosine between the 16-bit and the float32 gradient,
            None in other phases.
    """

    layer: str
    phase: str
    verdict: str
    relative_error: float
    headroom_bits: float
    advice: str
    gradient_cosine: float | None = None


def cells_of(row: Row) -> tuple[str, ...]:
    """Returns a row's cells as the tables print them."""
    return (
        row.layer,
        row.phase,
        row.verdict,
        f"{row.relative_error:.2g}",
        f"{row.headroom_bits:+.0f} bits",
        row.advice,
    )
