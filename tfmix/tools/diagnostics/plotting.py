"""Draws the headroom of layers, with matplotlib."""

import io
import os
from typing import Any

from tfmix import _formats

_RED, _YELLOW, _GREEN = "#b2182b", "#e0a526", "#4d9221"
_GREY = "#a6a6a6"
# Bars are cut at this length, because more headroom is never a concern.
_MOST_BITS = 24
# At most this many layers are drawn: faulty ones, then the least headroom.
_MOST_LAYERS = 40
_COLOURS = {"ok": _GREEN, "underflow": _YELLOW, "inaccurate": _YELLOW}

Path = str | os.PathLike[str]


def headroom(report: Any, path: Path | None = None) -> Any:
    """Draws how far each layer lies from overflow, forward and backward.

    Args:
        report: A `NumericsReport` of `tfmix.check`.
        path: Where to write a picture. Defaults to `None`: no file.

    Returns:
        The `matplotlib.figure.Figure`.

    Raises:
        ImportError: If matplotlib is missing.
    """
    found = {row.phase for row in report.rows}
    phases = [phase for phase in ("forward", "backward") if phase in found]
    names, left_out = _layers(report)
    figure = _figure(2 + 4.5 * len(phases), 1.6 + 0.28 * len(names))
    axes = figure.subplots(1, len(phases), squeeze=False, sharey=True)[0]
    for axis, phase in zip(axes, phases, strict=True):
        rows = {row.layer: row for row in report.rows if row.phase == phase}
        shown = [name for name in names if name in rows]
        bars = axis.barh(
            [names.index(name) for name in shown],
            [_bits(rows[name]) for name in shown],
            color=[_colour(rows[name]) for name in shown],
        )
        faults = [rows[name].verdict.replace("_", " ") for name in shown]
        labels = ["" if fault == "ok" else fault for fault in faults]
        axis.bar_label(bars, labels, padding=3, fontsize=8)
        axis.axvline(0, color="black", lw=0.8)
        axis.set_yticks(range(len(names)), names, fontsize=8, parse_math=False)
        axis.set_xlim(right=_MOST_BITS + 6)
        axis.set_title(f"{phase} pass", loc="left", fontsize=10)
        axis.set_xlabel(f"bits to overflow in {report.policy.compute_dtype}")
    if left_out:
        axes[0].set_ylabel(f"{left_out} more layers are not shown")
    axes[0].invert_yaxis()
    figure.supxlabel("green: 16 bit; grey: stays in float32", fontsize=8)
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure


def _layers(report: Any) -> tuple[list[str], int]:
    """Returns the layers to draw, in order, and how many are left out."""
    rows = [row for row in report.rows if row.phase != "weights"]
    rows.sort(key=lambda row: (row.verdict == "ok", row.headroom_bits))
    ranked = list(dict.fromkeys(row.layer for row in rows))
    drawn = set(ranked[:_MOST_LAYERS])
    # Layers go from input to output, and the loss comes last.
    names = [name for name in report.targets if name in drawn]
    names += sorted(drawn.difference(names))
    return names, len(ranked) - len(names)


def _figure(width: float, height: float) -> Any:
    from matplotlib import figure

    class Figure(figure.Figure):
        """A figure that a notebook displays, like those of pyplot."""

        def _repr_png_(self) -> bytes:
            written = io.BytesIO()
            self.savefig(written, format="png")
            return written.getvalue()

    # pyplot would keep the figure alive, and might open a display.
    return Figure(figsize=(width, height), layout="constrained")


def _bits(row: Any) -> float:
    return float(min(max(row.headroom_bits, -_MOST_BITS), _MOST_BITS))


def _colour(row: Any) -> str:
    # A float32 layer's numbers are never in the 16-bit format.
    if row.verdict == "ok" and row.dtype == _formats.FLOAT32.name:
        return _GREY
    return _COLOURS.get(row.verdict, _RED)
