"""The picture of the README, from results that other benchmarks saved.

Usage: python .ci/front_picture.py
"""

import json
import pathlib
import sys
from typing import Any

from matplotlib import figure

_COLOURS = {"tfmix": "#2166ac", "Keras": "#b8b8b8", "float32": "#d9c9a3"}
_MODEL = "transformer, 16384 tokens"
DOCS = pathlib.Path(__file__).parent.parent / "docs"


def counted(folder: pathlib.Path) -> list[tuple[str, dict[str, float], int]]:
    """Returns titles, a number for each library, and what it is out of.

    0 where less is better, and nothing is it out of.
    """
    step = "ms a step"
    times = {
        row["library"]: row[step]["median"]
        for row in _rows(folder, "gpu-jax", 0)
        if row["model, batch"] == _MODEL
        and row["precision"] == "mixed_bfloat16"
        and row["optimizer"] == "adam"
    }
    (float32,) = _rows(folder, "gpu-h100-jax", 0)
    faults = _rows(folder, "faults-tensorflow", 0)
    wild = _rows(folder, "wild-tensorflow", 0)
    trained = {row["library"]: row["train"] for row in wild}
    libraries = ("tfmix", "Keras")
    return [
        (
            "ms a step of a transformer,\nbfloat16, one H100: less is better",
            {
                "tfmix": times["tfmix"],
                "Keras": times["keras"],
                "float32": float32["Keras, ms"]["median"],
            },
            0,
        ),
        (
            "faults survived:\nmore is better",
            {
                name: sum(row[name].startswith("survives") for row in faults)
                for name in libraries
            },
            len(faults),
        ),
        (
            "scripts, hard in 16 bit, that\ntrain with one line on top",
            {name: trained[name] for name in libraries},
            wild[0]["whole scripts"],
        ),
    ]


def drawn(folder: pathlib.Path, stacked: bool = False) -> figure.Figure:
    """Draws a panel for each count, a bar for each library.

    Args:
        folder: Where the records are.
        stacked: Whether the panels stand below one another, for a phone.
    """
    panels = counted(folder)
    rows, size = (len(panels), (4.6, 5)) if stacked else (1, (9, 2.1))
    made = figure.Figure(figsize=size, layout="constrained")
    axes = made.subplots(rows, len(panels) // rows)
    for axis, (title, numbers, out_of) in zip(axes, panels, strict=True):
        names = list(numbers)[::-1]
        bars = axis.barh(
            names,
            [numbers[name] for name in names],
            color=[_COLOURS[name] for name in names],
        )
        of = f" of {out_of}" if out_of else ""
        labels = [f"{numbers[name]:.3g}{of}" for name in names]
        axis.bar_label(bars, labels, padding=4)
        axis.set_xlim(0, 1.4 * max(numbers.values()))
        axis.set_title(title, fontsize=10, loc="left")
        axis.set_xticks([])
        axis.spines[["top", "right", "bottom"]].set_visible(False)
    return made


def _rows(folder: pathlib.Path, name: str, table: int) -> list[dict[str, Any]]:
    record = json.loads((folder / f"{name}.json").read_text())
    return list(record["tables"][table]["rows"])


def main() -> int:
    """Draws and writes the picture, wide and for a phone."""
    records = DOCS / "benchmarks"
    drawn(records).savefig(DOCS / "front.png", dpi=160)
    drawn(records, stacked=True).savefig(DOCS / "front-narrow.png", dpi=160)
    return 0


if __name__ == "__main__":
    sys.exit(main())
