"""Finds rows that hold NaN or infinity, and describes them."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops, tree

# The number of values checked at a time, and of rows named in a message.
_BLOCK, _MOST_NAMED = 2**20, 3


class BadRows(NamedTuple):
    """The rows of one argument that are not finite."""

    name: str
    rows: tuple[int, ...]
    total: int  # the number of all rows

    @property
    def text(self) -> str:
        """The rows in words, as messages print them."""
        named = ", ".join(map(str, self.rows[:_MOST_NAMED]))
        more = ", ..." if len(self.rows) > _MOST_NAMED else ""
        return (
            f"`{self.name}` holds NaN or infinity in {len(self.rows)} of "
            f"{self.total} rows ({named}{more})"
        )


def find(data: Mapping[str, Any]) -> list[BadRows]:
    """Finds bad rows in nests of arrays, by argument name, on the host."""
    found = []
    for name, nest in data.items():
        rows: set[int] = set()
        total = 0
        for leaf in tree.flatten(nest):
            for start, block in blocks(leaf):
                if not (fine := np.isfinite(block)).all():
                    bad = start + np.flatnonzero(~fine.all(axis=1))
                    rows.update(bad.tolist())
                    total = max(total, len(leaf))
        if rows:
            found.append(BadRows(name, tuple(sorted(rows)), total))
    return found


def blocks(leaf: Any) -> Iterator[tuple[int, np.ndarray]]:
    """Yields the first row and the rows of each block of a float array.

    A block is a table: its other axes are flattened.
    """
    # A sparse tensor of TensorFlow cannot be sliced by rows.
    if not (is_array(leaf) and hasattr(leaf, "__getitem__")):
        return
    dtype = keras.backend.standardize_dtype(leaf.dtype)
    if not keras.backend.is_float_dtype(dtype) or not len(leaf.shape):
        return
    rows = max(_BLOCK // max(math.prod(leaf.shape[1:]), 1), 1)
    for start in range(0, leaf.shape[0], rows):
        block = np.asarray(leaf[start : start + rows])
        # A float64 number beyond float32 becomes infinite, as in the model.
        with np.errstate(over="ignore"):
            block = block.astype("float32", copy=False)
        yield start, block.reshape(len(block), -1)


def is_array(leaf: Any) -> bool:
    """Returns whether something is an array or a tensor."""
    return isinstance(leaf, np.ndarray) or bool(ops.is_tensor(leaf))


def beyond(what: str, largest: float, name: str, end: float) -> str:
    """Describes a value that is too large for a format."""
    return f"{what} reaches {largest:.3g} and {name} ends at {end:g}"
