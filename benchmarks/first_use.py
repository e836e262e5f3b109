"""Measures how long the first use of a model takes, before it is fast.

    python -m benchmarks.first_use [--turns 5] [--json] [--save=docs]

Keras's own policy and tfmix's take turns, each in a new process. The numbers
are seconds of CPU time, since other processes on the machine change the time
that passes.
"""

from collections.abc import Iterator

import keras
from absl import flags

from benchmarks import answers, first_use_worker, pairs, results

POLICIES = "mixed_float16", "mixed_bfloat16"

FLAGS = results.flag_values()
flags.DEFINE_integer("turns", 5, "pairs of processes", flag_values=FLAGS)


def tables() -> Iterator[results.Table]:
    """Measures every model under every policy."""
    rows = []
    for name in first_use_worker.MODELS:
        for policy in POLICIES:
            found = _in_turns(name, policy)
            rows += [{"model": name, "policy": policy, **row} for row in found]
    is_jax = keras.backend.backend() == "jax"
    yield results.Table("JAX" if is_jax else "TensorFlow", rows)


def _in_turns(model: str, policy: str) -> list[dict]:
    """Returns a row for each part of the first use."""
    seconds: dict[str, list[dict[str, float]]] = {"Keras": [], "tfmix": []}

    def measured(system: str) -> float:
        found = answers.answer_of(
            "benchmarks.first_use_worker", system, policy, model
        )
        seconds[system].append(found)
        return found["together"]

    systems = {name: lambda name=name: measured(name) for name in seconds}
    pairs.in_turns(systems, FLAGS.turns, warm=0)
    rows = []
    for part in seconds["tfmix"][0]:
        ours, theirs = (
            [turn[part] for turn in seconds[system]]
            for system in ("tfmix", "Keras")
        )
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        rows.append(
            {
                "part": part,
                "Keras, s": results.spread(theirs),
                "tfmix, s": results.spread(ours),
                "ratio": results.spread(ratios),
            }
        )
    return rows


if __name__ == "__main__":
    results.run(
        "first_use", FLAGS, tables, "median and extremes of {turns} pairs"
    )
