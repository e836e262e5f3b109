"""Settings that hold inside a `with` block and everything it calls.

Each thread has its own record, so other threads do not see it.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any

import keras


@dataclasses.dataclass(frozen=True)
class Block:
    """The settings of the running code.

    Attributes:
        rules: The active op rules; `None` for those that are installed.
        policies: The policy of new layers, and one that Keras has set in its
            place; `None` for that of the process.
        around: What the running model call is part of, `None` if of nothing.
        gates: The gates of the model's call that runs, `None` if there are
            none.
        power: The power of two of the gradients that are formed now, `None`
            if they are unscaled.
        in_loop: Whether the code runs in each step of a loop.
        in_map: Whether TensorFlow converts the code to run for all rows.
        users_code: The dtype of the user's code that is running, else "". In
            "16 bit" it is tried, and falls back to float32 if that fails. To
            code in "float32" the layers that it calls return float32.
        takes_unscaled: Whether an `apply_gradients` around gets gradients that
            are not scaled.
        step: The train step that is running, `None` if there is none.
    """

    rules: frozenset[str] | None = None
    policies: tuple[keras.DTypePolicy, ...] | None = None
    around: Any = None
    gates: Any = None
    power: Any = None
    in_loop: bool = False
    in_map: bool = False
    users_code: str = ""
    takes_unscaled: bool = False
    step: Any = None


_NOTHING = Block()
# tfmix's own code casts explicitly.
NO_RULES: frozenset[str] = frozenset()
# `block.get()` returns the caller's settings.
block = contextvars.ContextVar("tfmix_block", default=_NOTHING)


class _Installed:
    # These hold outside of blocks.
    rules = NO_RULES


installed = _Installed()


def active_rules() -> frozenset[str]:
    """Returns the rules of the caller's block, or the installed ones."""
    own = block.get().rules
    return installed.rules if own is None else own


@contextlib.contextmanager
def holding(**values: Any) -> Iterator[None]:
    """Changes some settings for a block.

    Args:
        **values: New values by the names of `Block`; others stay.
    """
    outside = block.get()
    block.set(Block(**{**vars(outside), **values}))
    try:
        yield
    finally:
        block.set(outside)
