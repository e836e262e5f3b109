"""The picture of the README, from results that other benchmarks saved.

Usage: python .ci/front_picture.py
"""

import json
import pathlib
import sys
from typing import Any

from matplotlib import figure

_COLOURS = {"Keras": "#b8b8b8", "tfmix": "#2166ac"}
DOCS = pathlib.Path(__file__).parent.parent / "docs"


def counted(folder: pathlib.Path) -> list[tuple[str, dict[str, int], int]]:
    """Returns titles, a number for each library, and what it is out of.

    0 where less is better, and nothing is it out of.
    """
    faults = _rows(folder, "faults-tensorflow", 0)
    survived = {
        name: sum(row[name].startswith("survives") for row in faults)
        for name in _COLOURS
    }
    wild = _rows(folder, "wild-tensorflow", 0)
    trained = {row["library"]: row["train"] for row in wild}
    steps = _rows(folder, "compiled-jax", 1)
    kernels = {row["optimizer"]: row["kernels"] for row in steps}
    added = {name: kernels[name] - kernels["bare"] for name in _COLOURS}
    return [
        ("faults survived", survived, len(faults)),
        (
            "whole scripts that train\nwith one line on top",
            trained,
            wild[0]["whole scripts"],
        ),
        ("kernels added to a step\nof 200 variables, H200", added, 0),
    ]


def drawn(folder: pathlib.Path) -> figure.Figure:
    """Draws a panel for each count, a bar for each library."""
    panels = counted(folder)
    made = figure.Figure(figsize=(9, 2.1), layout="constrained")
    axes = made.subplots(1, len(panels))
    for axis, (title, numbers, out_of) in zip(axes, panels, strict=True):
        names = list(_COLOURS)[::-1]
        bars = axis.barh(
            names,
            [numbers[name] for name in names],
            color=[_COLOURS[name] for name in names],
        )
        of = f" of {out_of}" if out_of else ""
        labels = [f"{numbers[name]}{of}" for name in names]
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
    """Draws and writes the picture."""
    drawn(DOCS / "benchmarks").savefig(DOCS / "front.png", dpi=110)
    return 0


if __name__ == "__main__":
    sys.exit(main())
