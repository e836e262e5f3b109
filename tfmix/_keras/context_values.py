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
        policy: The policy of new layers; `None` for that of the scopes.
        around: What the running model call is part of, `None` if of nothing.
        place_of_step: In a model's step the place that its optimizer gives it,
            else `None`.
        gates: The gates of the model's call that runs, `None` if there are
            none.
        asked: The `id`s of the tensors whose gradients a tape forms now.
        power: The power of two of the gradients that are formed now, `None`
            if they are unscaled.
        in_fit: Whether `fit`, or another method of a model, runs its step, so
            that a line after the epoch reports skipped steps.
        in_inference: Whether Keras runs a step of `evaluate` or `predict`.
        unasked: A token of the trace whose gradient nobody can ask for, `None`
            if there is none (JAX).
        fit: The callback that reports the skipped steps of the `fit` around,
            `None` outside of one.
        in_loop: Whether the code runs in each step of a loop.
        in_map: Whether TensorFlow converts the code to run for all rows.
        may_fall_back: Whether a user's layer is tried in 16 bit, and falls back
            to float32 if that fails.
        is_float32_code: Whether the running code is that of a user's layer in
            float32, to which the layers that it calls return float32.
        is_chosen: Whether a caller decides whether the step is applied.
        takes_unscaled: Whether an `apply_gradients` around gets gradients that
            are not scaled.
        step: The train step that is running, `None` if there is none.
        platform: The platform that a step is only compiled for, or "".
    """

    rules: frozenset[str] | None = None
    policy: keras.DTypePolicy | None = None
    around: Any = None
    place_of_step: Any = None
    gates: Any = None
    asked: frozenset[int] = frozenset()
    power: Any = None
    in_fit: bool = False
    in_inference: bool = False
    unasked: Any = None
    fit: Any = None
    in_loop: bool = False
    in_map: bool = False
    may_fall_back: bool = False
    is_float32_code: bool = False
    is_chosen: bool = False
    takes_unscaled: bool = False
    step: Any = None
    platform: str = ""


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
