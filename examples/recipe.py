"""How an example becomes a script: its variants, run from every seed.

An example says how one network is trained, and what it claims of all of them.
`Recipe` does the rest: the flags, the progress bar, the table, the picture.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
from rich import progress

from tfmix.examples import common, pictures

# Called with the loss, so that the progress bar moves.
Ticker = Callable[[float], None]
SEEDS = 3


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One example.

    Attributes:
        doc: The script's docstring, for `--help`.
        variants: Names of the ways of training.
        train: Called with a variant's name, a seed (which is set by then), how
            long to train, and a `Ticker`.
        claims: Called with all runs; returns sentences, and whether each came
            true.
        length: The flag that says how long to train: name, default, help.
        picture: The picture's file name without its ending, and its title.
        unit: What the scores are. Defaults to `"accuracy"`.
        ticks: How often `train` moves the bar, by how long it trains.
            Defaults to as often as that, for instance after each epoch.
        curve: What the runs' `curve` shows, for the picture's second half.
            Defaults to `""`: there is none.
        axis: What the picture's losses are of. Defaults to `"epoch"`.
    """

    doc: str
    variants: Sequence[str]
    train: Callable[[str, int, int, Ticker], common.Run]
    claims: Callable[[tuple[common.Run, ...]], dict[str, bool]]
    length: tuple[str, int, str]
    picture: tuple[str, str]
    unit: str = "accuracy"
    ticks: Callable[[int], int] = int
    curve: str = ""
    axis: str = "epoch"

    def run(
        self,
        length: int | None = None,
        seeds: int = SEEDS,
        quiet: bool = False,
        out: str | None = None,
    ) -> common.Outcome:
        """Trains every variant from every seed.

        Args:
            length: How long, for instance how many epochs. Defaults to
                `None`, what the flag's default is.
            seeds: Runs of each variant. Defaults to 3.
            quiet: Whether to leave out the progress bar. Defaults to `False`.
            out: Folder for the picture. Defaults to `None`, no picture.

        Returns:
            All runs, and what came true.
        """
        much = self.length[1] if length is None else length
        runs = train_all(
            self.variants,
            seeds,
            self.ticks(much),
            lambda name, seed, tick: self.train(name, seed, much, tick),
            quiet,
        )
        file, title = self.picture
        drawn = pictures.losses(runs, out, file, title, self.curve, self.axis)
        return common.Outcome(runs, self.claims(runs), drawn, self.unit)

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Reads the flags, runs, prints; returns 1 if a claim is false."""
        name, default, text = self.length
        values = common.parse(argv, self.doc, **{name: (default, text)})
        return common.finish(
            self.run(values[name].value, values.seeds, values.quiet, values.out)
        )


def train_all(
    variants: Sequence[str],
    seeds: int,
    ticks: int,
    train: Callable[[str, int, Ticker], common.Run],
    quiet: bool = False,
) -> tuple[common.Run, ...]:
    """Trains every variant from every seed, with a progress bar.

    Args:
        variants: Their names.
        seeds: Runs of each.
        ticks: How often a run moves the bar, for instance its epochs.
        train: Called with a variant's name, a seed (which is set by then) and
            a `Ticker` to call `ticks` times.
        quiet: Whether to leave out the bar. Defaults to `False`.

    Returns:
        What `train` returned.
    """
    runs = []
    columns = (*progress.Progress.get_default_columns(), "{task.fields[loss]}")
    with progress.Progress(*columns, disable=quiet) as bar:
        total = len(variants) * seeds * ticks
        task = bar.add_task("training", total=total, loss="")

        def tick(loss: float) -> None:
            bar.update(task, advance=1, loss=f"loss {loss:.4f}")

        for variant in variants:
            for seed in range(seeds):
                name = f"{variant}, seed {seed}"
                bar.update(task, description=name)
                keras.utils.set_random_seed(seed)
                runs.append(train(variant, seed, tick))
                # Where the output is no terminal, the bar shows only its end.
                if not quiet:
                    bar.console.print(f"{name}: {runs[-1].score:.2%}")
    return tuple(runs)


class Tick(keras.callbacks.Callback):
    """Moves the bar after each epoch of `fit`."""

    def __init__(self, tick: Ticker) -> None:
        super().__init__()
        self.tick = tick

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Passes the epoch's loss on."""
        self.tick((logs or {}).get("loss", float("nan")))
