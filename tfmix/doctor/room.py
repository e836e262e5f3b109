"""Gradients that fit at the lowest loss scale, with nothing left."""

from collections.abc import Sequence

from tfmix import _formats
from tfmix.doctor import gaps as compare
from tfmix.doctor import verdicts

# Bits kept free. The scale cannot go lower, and the next batch has other
# gradients: over 200 steps they come to 3 times those at the start.
_BITS = 2


def finding(
    layer: str,
    order: int,
    gaps: Sequence[compare.Gap | None],
    dtypes: Sequence[str],
) -> verdicts.Finding | None:
    """Judges gradients at the lowest loss scale, where all steps may be lost.

    Args:
        layer: The layer's name, or `"loss"`.
        order: Its rank in the order of computation.
        gaps: Of its gradients; None where there is none.
        dtypes: What it computes in.

    Returns:
        The finding; None if there is room, or nothing in 16 bit.
    """
    sixteen = [name for name in dtypes if name in _formats.SIXTEEN_BIT]
    tight = [gap for gap in gaps if gap is not None and _is_tight(gap)]
    if not sixteen or not tight:
        return None
    return verdicts.Finding(
        layer,
        verdicts.BACKWARD,
        verdicts.OVERFLOW,
        min(tight, key=lambda gap: gap.headroom_bits),
        order,
        latent=True,
        note=f"at a loss scale of 1 its gradient all but fills {sixteen[0]}",
    )


def _is_tight(gap: compare.Gap) -> bool:
    # Beyond one bit too many, what is not lost was not made in 16 bit.
    return not gap.broken and -1 <= gap.headroom_bits < _BITS
