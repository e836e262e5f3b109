"""What a conversion did, one row per layer, and the way back."""

import dataclasses
from collections.abc import Callable

import keras

from tfmix import _tables

_HEADS = ("layer", "class", "from", "to", "why")


@dataclasses.dataclass(frozen=True)
class Row:
    """One layer of a converted model.

    Attributes:
        layer: The layer's path, or its name where it has none.
        layer_class: The name of its class.
        before: The name of its dtype policy before.
        after: The name of its dtype policy now.
        why: Why it has that policy.
    """

    layer: str
    layer_class: str
    before: str
    after: str
    why: str


class ConversionReport(_tables.Printed):
    """Says what `apply_policy` did; prints as a table.

    Args:
        policy: The policy that was applied.
        rows: One row per layer, in the model's order.
        undo: Takes the conversion back.
        notes: Sentences on what a reader should know besides.

    Attributes:
        policy: The policy that was applied.
        rows: Tuple of `Row`.
        notes: Tuple of sentences.

    Example:
        >>> row = Row("dense", "Dense", "float32", "mixed_float16", "")
        >>> policy = keras.DTypePolicy("mixed_float16")
        >>> print(str(ConversionReport(policy, [row], print)).splitlines()[0])
        1 layer: 1 changed to mixed_float16, 0 kept in float32
    """

    def __init__(
        self,
        policy: keras.DTypePolicy,
        rows: list[Row],
        undo: Callable[[], None],
        notes: tuple[str, ...] = (),
    ) -> None:
        self.policy = policy
        self.rows = tuple(rows)
        self.notes = notes
        self._undo: Callable[[], None] | None = undo

    def undo(self) -> None:
        """Puts every dtype, method and optimizer back as it was before.

        Trained weights and the inner optimizer's state stay as they are now:
        undoing a conversion does not undo training. An optimizer that the
        model was compiled with since stays, too; the wrapper that tfmix put
        on it goes.

        Raises:
            RuntimeError: If it has been called before, or the model, or a
                part of it, was converted again since.
        """
        if self._undo is None:
            raise RuntimeError(
                "This conversion has been undone already. Call "
                "`apply_policy(model, policy)` to convert the model again."
            )
        self._undo()
        self._undo = None

    @property
    def kept(self) -> tuple[Row, ...]:
        """The rows of the layers that compute in float32."""
        return tuple(row for row in self.rows if row.after == "float32")

    def __repr__(self) -> str:
        return f"<ConversionReport {self._summary()}>"

    def tables(self) -> list[_tables.Table]:
        """Returns what to print."""
        rows = [dataclasses.astuple(row) for row in self.rows]
        return [_tables.Table(_HEADS, rows, self._summary(), self.notes)]

    def _summary(self) -> str:
        changed = sum(row.before != row.after for row in self.rows)
        layers = "layer" if len(self.rows) == 1 else "layers"
        return (
            f"{len(self.rows)} {layers}: {changed} changed to "
            f"{self.policy.name}, {len(self.kept)} kept in float32"
        )
