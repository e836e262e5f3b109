"""Pictures of the examples; none where matplotlib is missing."""

import pathlib
from collections.abc import Sequence

import numpy as np

from tfmix.examples import common

_STYLES = ("-", "--", ":", "-.")


def losses(
    runs: Sequence[common.Run],
    out: str | None,
    name: str,
    title: str,
    unit: str = "epoch",
) -> str | None:
    """Draws each variant's training loss: the mean, and a band of the seeds.

    Args:
        runs: Runs whose `losses` are equally long within a variant.
        out: The folder, made if it is missing; empty or `None` for none.
        name: The file's name without its ending.
        title: Stands above the axes.
        unit: What one loss belongs to. Defaults to `"epoch"`.

    Returns:
        The file, or `None` if none was drawn.
    """
    if not out:
        return None
    try:
        from matplotlib import figure
    except ModuleNotFoundError:
        return None
    drawn = figure.Figure(figsize=(7, 4), layout="constrained")
    axes = drawn.subplots()
    variants = list(dict.fromkeys(run.variant for run in runs))
    for number, variant in enumerate(variants):
        own = np.array([run.losses for run in runs if run.variant == variant])
        steps = np.arange(1, own.shape[1] + 1)
        style = _STYLES[number % len(_STYLES)]
        axes.plot(steps, own.mean(axis=0), style, label=variant)
        axes.fill_between(steps, own.min(axis=0), own.max(axis=0), alpha=0.15)
    axes.set(xlabel=unit, ylabel="training loss", yscale="log", title=title)
    axes.legend()
    return save(drawn, out, name)


def save(drawn: object, out: str, name: str) -> str:
    """Writes a figure as `out/name.png`; returns the file."""
    folder = pathlib.Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.png"
    drawn.savefig(path, dpi=150)  # type: ignore[attr-defined]
    return str(path)
