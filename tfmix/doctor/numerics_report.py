"""What a check found: a table, a page, and the policy that mends it."""

import base64
import dataclasses
import datetime
import html
import io
import json
import math
import os
import pathlib
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import keras

from tfmix import _tables
from tfmix.doctor import probe, suggest, verdicts
from tfmix.policy import policy as policies

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto;
       max-width: 72rem; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: .3rem .6rem;
         border-bottom: 1px solid #ddd; vertical-align: top; }
th { background: #f6f6f6; }
code, td:last-child { font-family: monospace; font-size: 13px;
                      overflow-wrap: anywhere; }
.overflow, .not_finite { background: #fbe3e4; }
.underflow, .inaccurate { background: #fdf3d8; }
.note { background: #fdf3d8; padding: .4rem .6rem; }
img { max-width: 100%; }
h1 { font-size: 1.6rem; line-height: 1.25; overflow-wrap: anywhere; }
td:nth-child(5), td:nth-child(6) { white-space: nowrap; }
.wide { overflow-x: auto; }
@media (max-width: 44rem) {
  .wide img { max-width: none; width: 44rem; }
  thead { display: none; }
  tr { display: block; padding: .4rem 0; border-bottom: 1px solid #ddd; }
  td { display: inline-block; border: 0; padding: 0 .5rem; }
  td:first-child { font-weight: 600; }
  td:last-child { display: block; }
  td:not(:first-child):not(:empty)::before {
    content: attr(data-label) " "; color: #666; font-size: 11px;
    font-family: system-ui, sans-serif; }
}
"""


@dataclasses.dataclass(frozen=True, eq=False)
class NumericsReport(_tables.Printed):
    """The result of `tfmix.check`; prints as a table.

    Attributes:
        rows: One `LayerVerdict` per layer and phase, the most severe first.
        policy: The `tfmix.Policy` that was checked.
        model_name: The name of the model.
        loss_scale: The loss scale that gradients were judged under.
        again: Checks the same model and batch under another policy.
        targets: The watched layers by name.
        sixteen_bit_layers: How many layers computed in 16 bit.
        notes: Sentences on what is wrong with the model as a whole, on layers
            that fell back to float32, and on what was not checked.
    """

    rows: tuple[verdicts.LayerVerdict, ...]
    policy: policies.Policy
    model_name: str
    again: Callable[[policies.Policy], "NumericsReport"] = dataclasses.field(
        repr=False
    )
    targets: Mapping[str, probe.Target] = dataclasses.field(repr=False)
    sixteen_bit_layers: int
    loss_scale: float
    notes: tuple[str, ...]

    @property
    def healthy(self) -> bool:
        """Whether every row is fine."""
        return not self.faults

    @property
    def faults(self) -> tuple[verdicts.LayerVerdict, ...]:
        """The rows that are not fine, the most severe first."""
        return tuple(row for row in self.rows if row.verdict != verdicts.OK)

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
        return suggest.fewest_layers(self, progress)

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Draws the headroom of each layer, as `tfmix.plotting.headroom`."""
        from tfmix import plotting

        return plotting.headroom(self, path)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Writes to `path` one page with table and figure, all in one file."""
        try:
            picture = _picture(self.plot())
        except ImportError:
            # The table says all that the picture shows.
            picture = ""
        pathlib.Path(path).write_text(_page(self, picture), encoding="utf-8")

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
        """Returns the table that is printed: all faults, and what is nearest.

        Of the rows that are fine, those with the least headroom are shown;
        `rows` and `to_html` have all.
        """
        fine = [row for row in self.rows if row.verdict == verdicts.OK]
        fine.sort(key=lambda row: row.headroom_bits)
        left_out = set(map(id, fine[_FINE_SHOWN:]))
        shown = [row for row in self.rows if id(row) not in left_out]
        notes = list(self.notes)
        if left_out:
            notes.append(
                f"{len(left_out)} more rows are ok: `report.rows` holds all, "
                "`report.to_html(path)` writes them."
            )
        title = f"{self.title} (loss scale {self.loss_scale:g})"
        found = [row.verdict for row in shown]
        cells = list(map(_cells, shown))
        return [_tables.Table(_HEADS, cells, title, notes, _code(shown), found)]


_HEADS = ("layer", "dtype", "phase", "verdict", "error", "headroom")
# Rows without a fault that are printed.
_FINE_SHOWN = 10


def _cells(row: verdicts.LayerVerdict) -> tuple[str, ...]:
    return (
        row.layer,
        row.dtype,
        row.phase,
        row.verdict,
        f"{row.relative_error:.2g}",
        f"{row.headroom_bits:+.0f} bits",
    )


def _code(rows: Iterable[verdicts.LayerVerdict]) -> list[str]:
    """Returns the lines to write, each once, below a comment that says why."""
    known: dict[str, str] = {}
    for row in rows:
        code, _, why = row.advice.partition("  # ")
        if row.verdict != verdicts.OK:
            said = f"{row.layer}, {row.phase}, {row.verdict}: {why}"
            known.setdefault(code, said)
    lines = ["What to write:"] if known else []
    for code, said in known.items():
        # Each line a comment, so that all of it can be pasted.
        lines += [f"# {line}" for line in textwrap.wrap(said, 76)]
        lines.append(code)
    return lines


def _plain(row: verdicts.LayerVerdict) -> dict[str, Any]:
    values = dataclasses.asdict(row)
    for key, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            values[key] = None
    return values


def _page(report: NumericsReport, picture: str) -> str:
    """Returns one HTML page that needs no other file."""
    title = html.escape(report.title)
    table = _tables.Table(
        (*_HEADS, "what to write"),
        [(*_cells(row), row.advice) for row in report.rows],
        verdicts=[row.verdict for row in report.rows],
    )
    notes = "".join(
        f'<p class="note">{html.escape(note)}</p>\n' for note in report.notes
    )
    summary = ""
    if report.faults:
        first = report.faults[0]
        summary = (
            f"<p><b>First: {html.escape(first.layer)}</b>, {first.phase}, "
            f"{first.verdict}: <code>{html.escape(first.advice)}</code></p>\n"
        )
    return (
        "<!DOCTYPE html>\n"
        f'<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head>\n"
        f"<body><h1>{title}</h1>\n"
        f"<p>Model <b>{html.escape(report.model_name)}</b>, {_made_with()}.</p>"
        "\n"
        f"<p>Gradients were judged under a loss scale of "
        f"{report.loss_scale:g}. Each layer was judged by itself, on the "
        f"inputs it has in float32.</p>\n"
        f"{summary}{notes}{picture}{table.html()}</body></html>\n"
    )


def _made_with() -> str:
    """Says when, and by which versions, something is made."""
    now = datetime.datetime.now().astimezone()
    tfmix = vars(sys.modules["tfmix"])["__version__"]
    return (
        f"{now:%Y-%m-%d %H:%M %Z}, tfmix {tfmix}, Keras {keras.__version__} "
        f"on {keras.backend.backend()}"
    )


def _picture(figure: Any) -> str:
    written = io.BytesIO()
    figure.savefig(written, format="png", dpi=110)
    data = base64.b64encode(written.getvalue()).decode("ascii")
    source = f"data:image/png;base64,{data}"
    image = f'<img alt="Headroom of each layer" src="{source}">'
    return f'<p class="wide">{image}</p>\n'
