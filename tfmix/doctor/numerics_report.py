"""What a check found: rows, a table, a figure, a page, a policy."""

import dataclasses
import json
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import rich.box
import rich.table

from tfmix import _tables
from tfmix.doctor import probe, suggest, verdicts
from tfmix.doctor import rows as table_rows
from tfmix.policy import policy as policies

_STYLES = {
    verdicts.OK: "green",
    verdicts.OVERFLOW: "bold red",
    verdicts.NOT_FINITE: "bold red",
    verdicts.UNDERFLOW: "yellow",
    verdicts.INACCURATE: "yellow",
}


@dataclasses.dataclass(frozen=True, eq=False)
class NumericsReport(_tables.Printed):
    """The result of `tfmix.check`; prints as a table.

    Attributes:
        rows: One `Row` per layer and phase, the most severe first.
        policy: The `tfmix.Policy` that was checked.
        loss_scale: The loss scale that gradients were judged under.
        again: Checks the same model and batch under another policy.
        targets: The watched layers by name.
        notes: Sentences on what is wrong with the model as a whole.
    """

    rows: tuple[table_rows.Row, ...]
    policy: policies.Policy
    loss_scale: float
    again: Callable[[policies.Policy], "NumericsReport"] = dataclasses.field(
        repr=False
    )
    targets: Mapping[str, probe.Target] = dataclasses.field(repr=False)
    notes: tuple[str, ...] = ()

    @property
    def healthy(self) -> bool:
        """Whether every row is fine."""
        return not self.faults

    @property
    def faults(self) -> tuple[table_rows.Row, ...]:
        """The rows that are not fine, the most severe first."""
        return tuple(row for row in self.rows if row.verdict != verdicts.OK)

    def suggested_policy(self, *, progress: bool = True) -> policies.Policy:
        """Searches the fewest float32 layers that make the model healthy.

        Each candidate is checked on the same batch, so the search takes as
        long as a few checks.

        Args:
            progress: Boolean, whether to show the search. Defaults to `True`.

        Returns:
            A `tfmix.Policy`: the one that was checked if that is healthy;
            else one with more `float32_layers`.

        Raises:
            ValueError: If the model is not finite in float32 either.
        """
        return suggest.policy(self, progress=progress)

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Draws the headroom of each layer.

        Args:
            path: Where to write a picture. Defaults to `None`: nowhere.

        Returns:
            The `matplotlib.figure.Figure`.

        Raises:
            ImportError: If matplotlib is missing.
        """
        from tfmix import plotting

        return plotting.headroom(self, path)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Writes one page with table and figure that needs no other file.

        Args:
            path: Where to write it.
        """
        from tfmix.doctor import html_page

        with open(path, "w", encoding="utf-8") as file:
            file.write(html_page.document(self))

    def to_json(self) -> str:
        """Returns the report as JSON; infinities and NaN become null."""
        return json.dumps(
            {
                "healthy": self.healthy,
                "policy": self.policy.name,
                "loss_scale": self.loss_scale,
                "notes": list(self.notes),
                "rows": [_plain(dataclasses.asdict(row)) for row in self.rows],
            },
            indent=2,
        )

    def __rich__(self) -> rich.table.Table:
        table = rich.table.Table(
            title=self._title(),
            box=rich.box.SIMPLE_HEAD,
            title_justify="left",
            caption="\n".join(map(rich.markup.escape, self.notes)) or None,
            caption_justify="left",
        )
        for column in table_rows.COLUMNS:
            table.add_column(column, overflow="fold")
        for row in self.rows:
            style = _STYLES[row.verdict]
            cells = table_rows.cells_of(row)
            # Names and advice hold brackets, which rich would take for style.
            table.add_row(*map(rich.markup.escape, cells), style=style)
        return table

    def _title(self) -> str:
        count = len({row.layer for row in self.faults})
        verdict = "healthy" if self.healthy else f"{count} layer(s) at fault"
        return (
            f"{self.policy.name} against float32: {verdict} "
            f"(loss scale {self.loss_scale:g})"
        )


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {
        key: None
        if isinstance(value, float) and not math.isfinite(value)
        else value
        for key, value in values.items()
    }
