"""Compares the scripts of `examples/` with float32, from three seeds.

python -m benchmarks.recipes [NAME ...] [--seeds=3] [--json] [--save=docs]

The names are those of `COMPARISONS` in `tests/examples/compared.py`. Each run
has a process of its own.
"""

import statistics
from collections.abc import Iterator, Sequence

from absl import flags

from benchmarks import results
from tests.examples import compared

# What a script's score is, where it is not the accuracy on test data.
_SCORES = {
    "fine_tuning": ", R2",
    "gan": ", drawings recognised",
    "diffusion": ", drawings recognised",
}


def rows(name: str, seeds: int) -> Iterator[dict[str, str]]:
    """Runs a script; yields a row per variant in 16 bit."""
    runs = compared.run_all(compared.COMPARISONS[name], seeds)
    float32, *others = runs
    for other in others:
        yield {
            "script": name + _SCORES.get(name, ""),
            "variant": other,
            "float32": mean_and_range(compared.scores(runs[float32])),
            "16 bit": mean_and_range(compared.scores(runs[other])),
        }


def mean_and_range(scores: Sequence[float]) -> str:
    """Returns a cell with the mean, the lowest and the highest score."""
    mean = statistics.mean(scores)
    return f"{mean:.2f} ({min(scores):.1f}–{max(scores):.1f})"


FLAGS = results.flag_values()
flags.DEFINE_integer("seeds", 3, "runs of each variant", flag_values=FLAGS)


def tables() -> Iterator[results.Table]:
    """Runs the named scripts, or all."""
    names = results.parse(FLAGS) or list(compared.COMPARISONS)
    found = [
        row
        for name in results.track(names, "scripts")
        for row in rows(name, FLAGS.seeds)
    ]
    yield results.Table("Examples in 16 bit", found)


if __name__ == "__main__":
    how = "mean, lowest and highest of {seeds} seeds"
    results.run("recipes", FLAGS, tables, how)
