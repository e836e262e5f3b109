"""What a conversion did, one row per layer, and the way back."""

import dataclasses
import html
import io
from collections.abc import Callable
from typing import Any


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


class ConversionReport:
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
        >>> print(ConversionReport("mixed_float16", [row], lambda: None))
        1 layer: 1 changed to mixed_float16, 0 kept in float32
        layer  class  from     to             why
        dense  Dense  float32  mixed_float16
    """

    def __init__(
        self,
        policy: Any,
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
        undoing a conversion does not undo training.

        Raises:
            RuntimeError: If it has been called before.
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

    def __str__(self) -> str:
        heads = ("layer", "class", "from", "to", "why")
        cells = [heads, *map(_cells, self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [self._summary()]
        for row in cells:
            padded = map(str.ljust, row, widths)
            lines.append("  ".join(padded).rstrip())
        return "\n".join([*lines, *self.notes])

    def __repr__(self) -> str:
        return f"<ConversionReport {self._summary()}>"

    def __rich__(self) -> Any:
        from rich import table

        shown = table.Table(title=self._summary())
        for head in ("layer", "class", "from", "to", "why"):
            shown.add_column(head)
        for row in self.rows:
            shown.add_row(*_cells(row))
        shown.caption = "\n".join(self.notes) or None
        return shown

    def _repr_html_(self) -> str:
        text = io.StringIO()
        text.write(f"<p>{html.escape(self._summary())}</p><table><tr>")
        for head in ("layer", "class", "from", "to", "why"):
            text.write(f"<th>{head}</th>")
        for row in self.rows:
            text.write("</tr><tr>")
            for cell in _cells(row):
                text.write(f"<td>{html.escape(cell)}</td>")
        text.write("</tr></table>")
        for note in self.notes:
            text.write(f"<p>{html.escape(note)}</p>")
        return text.getvalue()

    def _summary(self) -> str:
        name = getattr(self.policy, "name", self.policy)
        changed = sum(row.before != row.after for row in self.rows)
        layers = "layer" if len(self.rows) == 1 else "layers"
        return (
            f"{len(self.rows)} {layers}: {changed} changed to {name}, "
            f"{len(self.kept)} kept in float32"
        )


def _cells(row: Row) -> tuple[str, ...]:
    return dataclasses.astuple(row)
