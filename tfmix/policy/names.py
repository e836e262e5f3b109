"""The names of policies, and what people write instead of them."""

from tfmix import _arguments, _formats
from tfmix.policy import float32_layers

DTYPE_NAMES = (
    "float32",
    "mixed_float16",
    "mixed_bfloat16",
    "float16",
    "bfloat16",
)
# This policy is mixed_bfloat16, with float8 products in some layers.
FLOAT8 = "mixed_float8"
NAMES = (*DTYPE_NAMES, FLOAT8, "auto", *float32_layers.LEVELS)

# Names from other libraries are suggestions in an error, not accepted.
_ALIASES = {
    **dict.fromkeys(
        ("fp32", "float", "single", "full", "mixed_float32"), "float32"
    ),
    **dict.fromkeys(
        (
            *("fp16", "half", "mixed", "amp", "16", "16-mixed"),
            *("mixed_fp16", "mixed_half", "mixed_precision"),
            *("float16_mixed", "fp16_mixed", "half_mixed"),
        ),
        "mixed_float16",
    ),
    **dict.fromkeys(
        ("bf16", "bfloat", "bf16-mixed", "mixed_bf16", "bfloat16_mixed"),
        "mixed_bfloat16",
    ),
    "f16": "float16",
    **dict.fromkeys(("float8", "fp8", "f8", "mixed_fp8"), FLOAT8),
    **{f"o{number}": f"O{number}" for number in range(4)},
}


def check(name: object) -> None:
    """Raises an error for an unknown policy name, and suggests the closest."""
    allowed = f"one of {list(NAMES)}"
    if not isinstance(name, str):
        dtype = getattr(name, "name", None) or getattr(name, "__name__", "")
        hint = f" Did you mean {dtype!r}?" if dtype in DTYPE_NAMES else ""
        if dtype in _formats.SIXTEEN_BIT:
            hint = f" Did you mean 'mixed_{dtype}', or pure {dtype!r}?"
        raise TypeError(
            f"A policy's name must be a string, {allowed}. "
            f"Received: name={name!r} of type {type(name).__name__}.{hint}"
        )
    if name not in NAMES:
        raise ValueError(
            f"A policy's name must be {allowed}. "
            f"Received: name={name!r}.{_hint(name)}"
        )


def _hint(name: str) -> str:
    key = name.strip().lower()
    candidates = {own: own for own in (*DTYPE_NAMES, FLOAT8, "auto")} | _ALIASES
    # Any word with an "o", such as "bool", would otherwise look like "O3".
    if key.startswith("o") and len(key) <= 3:
        candidates = {level.lower(): level for level in float32_layers.LEVELS}
    return _arguments.did_you_mean(key, candidates, cutoff=0.5)
