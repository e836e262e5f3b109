"""The names of policies, and what people write instead of them."""

from tfmix import _arguments
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

# Names from other libraries contain these. They are suggestions in an error,
# not accepted.
_MARKS = {
    "bf": "mixed_bfloat16",
    **dict.fromkeys(("fp8", "float8"), FLOAT8),
    **dict.fromkeys(("16", "half", "mixed", "amp"), "mixed_float16"),
    "32": "float32",
}


def check(name: object) -> None:
    """Raises an error for an unknown policy name, and suggests the closest."""
    allowed = f"one of {list(NAMES)}"
    if not isinstance(name, str):
        dtype = getattr(name, "name", None) or getattr(name, "__name__", "")
        raise TypeError(
            f"A policy's name must be a string, {allowed}. Received: "
            f"name={name!r} of type {type(name).__name__}.{_hint(str(dtype))}"
        )
    if name not in NAMES:
        raise ValueError(
            f"A policy's name must be {allowed}. "
            f"Received: name={name!r}.{_hint(name)}"
        )


def _hint(name: str) -> str:
    for mark, meant in _MARKS.items():
        if mark in name.lower():
            return f" Did you mean {meant!r}?"
    return _arguments.did_you_mean(name.strip(), NAMES, cutoff=0.5)
