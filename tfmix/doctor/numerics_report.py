"""What a check found: rows, a table, a figure, a page, a policy."""

import dataclasses
import json
import math
import os
import pathlib
from typing import Any

from tfmix import _tables
from tfmix.doctor import html_page, suggest, verdicts
from tfmix.policy import policy as policies


@dataclasses.dataclass(frozen=True, eq=False)
class NumericsReport(suggest.Checked, _tables.Printed):
    """The result of `tfmix.check`; prints as a table.

    Attributes:
        rows: One `LayerVerdict` per layer and phase, the most severe first.
        policy: The `tfmix.Policy` that was checked.
        loss_scale: The loss scale that gradients were judged under.
        again: Checks the same model and batch under another policy.
        targets: The watched layers by name.
        sixteen_bit_layers: How many layers computed in 16 bit.
        notes: Sentences on what is wrong with the model as a whole, and on
            what was not checked.
    """

    loss_scale: float
    notes: tuple[str, ...]

    @property
    def forward_only(self) -> bool:
        """Whether no gradient was checked, for want of targets."""
        return all(row.phase != verdicts.BACKWARD for row in self.rows)

    @property
    def title(self) -> str:
        """One line: the policy, and whether the model is healthy."""
        count = len({row.layer for row in self.faults})
        state = "healthy" if self.healthy else f"{count} layer(s) at fault"
        if self.forward_only:
            state += ", forward pass only"
        return f"{self.policy.name} against float32: {state}"

    def suggested_policy(self, *, progress: bool = True) -> policies.Policy:
        """Searches the fewest float32 layers that make the model healthy.

        Each candidate is checked on the same batch: it takes as long as a
        few checks. A warning says so if nothing is left in 16 bit.

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
        """Draws the headroom of each layer, as `tfmix.plotting.headroom`."""
        from tfmix import plotting

        return plotting.headroom(self, path)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Writes to `path` one page with table and figure, all in one file."""
        try:
            figure = self.plot()
        except ImportError:
            # The table says all that the picture shows.
            figure = None
        page = html_page.document(
            self.title, self.tables()[0], self.loss_scale, self.faults, figure
        )
        pathlib.Path(path).write_text(page, encoding="utf-8")

    def to_json(self) -> str:
        """Returns the report as JSON; infinities and NaN become null."""
        return json.dumps(
            {
                "healthy": self.healthy,
                "forward_only": self.forward_only,
                "policy": self.policy.name,
                "loss_scale": self.loss_scale,
                "notes": list(self.notes),
                "rows": [_plain(row) for row in self.rows],
            },
            indent=2,
        )

    def tables(self) -> list[_tables.Table]:
        """Returns the table that is printed."""
        heads = ("layer", "phase", "verdict", "relative error", "headroom")
        rows = [
            (
                row.layer,
                row.phase,
                row.verdict,
                f"{row.relative_error:.2g}",
                f"{row.headroom_bits:+.0f} bits",
                row.advice,
            )
            for row in self.rows
        ]
        return [
            _tables.Table(
                (*heads, "what to write"),
                rows,
                f"{self.title} (loss scale {self.loss_scale:g})",
                self.notes,
                [row.verdict for row in self.rows],
            )
        ]


def _plain(row: verdicts.LayerVerdict) -> dict[str, Any]:
    values = dataclasses.asdict(row)
    for key, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            values[key] = None
    return values
