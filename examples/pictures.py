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
    curve: str = "",
    axis: str = "epoch",
) -> str | None:
    """Draws each variant's training loss: the mean, and a band of the seeds.

    Args:
        runs: Runs whose `losses` are equally long within a variant.
        out: The folder, made if it is missing; empty or `None` for none.
        name: The file's name without its ending.
        title: Stands above the axes.
        curve: What the runs' `curve` shows; it is drawn beside the losses,
            of each variant's first seed. Defaults to `""`: it is not drawn.
        axis: What the losses are of. Defaults to `"epoch"`.

    Returns:
        The file, or `None` if none was drawn.
    """
    if not out:
        return None
    try:
        from matplotlib import figure
    except ModuleNotFoundError:
        return None
    drawn = figure.Figure(figsize=(11 if curve else 7, 4), layout="constrained")
    drawn.suptitle(title)
    panels = drawn.subplots(1, 2 if curve else 1, squeeze=False)[0]
    variants = list(dict.fromkeys(run.variant for run in runs))
    for number, variant in enumerate(variants):
        own = [run for run in runs if run.variant == variant]
        values = np.array([run.losses for run in own])
        style = _STYLES[number % len(_STYLES)]
        steps = np.arange(1, values.shape[1] + 1)
        low, high = values.min(axis=0), values.max(axis=0)
        panels[0].plot(steps, values.mean(axis=0), style, label=variant)
        panels[0].fill_between(steps, low, high, alpha=0.15)
        if curve:
            panels[1].plot(own[0].curve, style, label=variant)
    panels[0].set(xlabel=axis, ylabel="training loss", yscale="log")
    panels[0].locator_params(axis="x", integer=True)
    if curve:
        panels[1].set(xlabel="step", ylabel=f"{curve}, first seed")
        panels[1].set_yscale("log", base=2)
    panels[0].legend()
    return save(drawn, out, name)


def save(drawn: object, out: str, name: str) -> str:
    """Writes a figure as `out/name.png`; returns the file."""
    folder = pathlib.Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.png"
    drawn.savefig(path, dpi=150)  # type: ignore[attr-defined]
    return str(path)
