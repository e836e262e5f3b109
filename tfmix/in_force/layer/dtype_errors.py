"""Errors that code raises for dtypes: which they are, and what they say."""

import re

from tfmix import _users_code

# Errors of both backends that code raises for dtypes.
_KINDS = frozenset(
    ("TypeError", "ValueError", "NotImplementedError", "InvalidArgumentError")
    + ("UnimplementedError", "NotFoundError")
)
# They name a 16-bit dtype, and a wider one or that it is not supported.
_NARROW = re.compile(
    r"(?<![a-z])(?:(?:DT_)?(?:b?float16|half)|bf?16)(?!\w)", re.I
)
_WIDE = re.compile(
    r"(?<![a-z])(?:DT_)?(?:float(?:32|64)?|double|complex(?:64|128)?)(?!\w)",
    re.I,
)
_REFUSED = re.compile(
    r"not (?:been )?(?:supported|implemented)|unsupported|does not accept"
    r"|no registered|not support",
    re.I,
)
_ARGUMENTS = re.compile(r"Arguments received by.*", re.S)
# What messages say about tensors besides: their dtype alone is then no cause,
# unless it is what differs.
_DIFFER = re.compile(r"(?:different|same) (?:d?types?|number, type)|not cast")
_TENSORS = re.compile(r"dtype[=:]\s*\S+|<tf.Tensor[^>]*>|Traced<[^>]*>", re.S)


def is_about_dtypes(error: Exception) -> bool:
    """Says whether an error names a 16-bit dtype, and what it clashes with."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    message = _ARGUMENTS.sub("", str(error))
    differ = _DIFFER.search(message)
    said = message if differ else _TENSORS.sub("", message)
    clashes = _NARROW.search(message) and _WIDE.search(said)
    refused = _NARROW.search(said) and _REFUSED.search(said)
    return bool(kinds & _KINDS and (clashes or refused))


def cause(error: Exception) -> str:
    """Returns what an error says first, and where."""
    text = re.sub(r"\x1b\[\d+m|Exception encountered .*", "", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    kind = f"{type(error).__name__}: "
    # AutoGraph says where before it says what.
    first = [line for line in lines if line.startswith(kind)] or lines or [""]
    said = first[0].removeprefix(kind).rstrip(".")
    return f"{_users_code.users_line(error)}{kind}{said}."
