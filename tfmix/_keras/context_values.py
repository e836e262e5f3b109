"""What holds for the code of a block, and for all that it calls: one record.

It is one of the thread's, so that no other thread sees it.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any

import keras


@dataclasses.dataclass(frozen=True)
class Block:
    """What holds for the caller.

    Attributes:
        rules: Which rules of ops; `None` for those that are installed.
        policy: Which policy new layers get; `None` for that of the scopes.
        around: What models are called inside of, `None` if of nothing.
        has_borders: Whether their gradients are scaled at a border.
        placing: A factor that says where gradients are placed inside of a
            border; `None` where no rule places them.
        in_loop: Whether it is computed in each step of a loop.
        may_fall_back: Whether a layer of the user's own is tried in 16 bit, and
            computes in float32 if that fails.
        is_chosen: Whether somebody around decides if a step is applied.
        step: The train step around the caller, `None` if there is none.
        platform: What TensorFlow traces for, "" if that is not known.
    """

    rules: frozenset[str] | None = None
    policy: keras.DTypePolicy | None = None
    around: Any = None
    has_borders: bool = True
    placing: Any = None
    in_loop: bool = False
    may_fall_back: bool = False
    is_chosen: bool = False
    step: Any = None
    platform: str = ""


_NOTHING = Block()
# Of code of tfmix's own, which says itself what is float32.
NO_RULES: frozenset[str] = frozenset()
# `block.get()` is what holds for the caller.
block = contextvars.ContextVar("tfmix_block", default=_NOTHING)


@contextlib.contextmanager
def holding(**values: Any) -> Iterator[None]:
    """Lets other values hold for a block.

    Args:
        **values: By the names of `Block`; the others stay what they are.
    """
    outside = block.get()
    before = {name: getattr(outside, name) for name in values}
    block.set(Block(**{**vars(outside), **values}))
    try:
        yield
    finally:
        # Only these: scopes need not end in the order in which they began.
        block.set(Block(**{**vars(block.get()), **before}))
