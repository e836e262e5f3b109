"""The float formats that tfmix works with, and their limits."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Format:
    """Limits of one binary floating-point format."""

    name: str  # the dtype name Keras uses
    max: float  # the largest finite value
    tiny: float  # the smallest positive normal value
    smallest: float  # the smallest positive subnormal value
    epsilon: float  # the gap between 1.0 and the next larger value


FLOAT16 = Format("float16", 65504.0, 2.0**-14, 2.0**-24, 2.0**-10)
BFLOAT16 = Format(
    "bfloat16", (2.0 - 2.0**-7) * 2.0**127, 2.0**-126, 2.0**-133, 2.0**-7
)
FLOAT32 = Format(
    "float32", (2.0 - 2.0**-23) * 2.0**127, 2.0**-126, 2.0**-149, 2.0**-23
)

# The limits of each format, by its dtype name.
LIMITS = {fmt.name: fmt for fmt in (FLOAT16, BFLOAT16, FLOAT32)}
SIXTEEN_BIT = (FLOAT16.name, BFLOAT16.name)
