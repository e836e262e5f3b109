"""Counts how many scripts, as people write them, train in 16 bit.

python -m benchmarks.wild [--json] [--save=docs]

Each script of `tests/wild` runs in graph mode under mixed_float16, once after
Keras's `set_dtype_policy` and once after `tfmix.set_global_policy`, in separate
processes. A script trains if it ends, all of its losses are finite, and the
last ones are within the range of three float32 runs and as much around it.
"""

from collections.abc import Mapping, Sequence

import keras
import numpy as np
from absl import flags, logging

from benchmarks import answers, results
from tests.wild import _scripts

LIBRARIES = ("Keras", "tfmix")
POLICY = "mixed_float16"
SEEDS = (1, 2, 3)


def losses(script: str, library: str, seed: int) -> list[float]:
    """Returns a script's losses after the one line, `[nan]` if it fails."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    if library == "Keras":
        keras.config.set_dtype_policy(POLICY)
    elif library == "tfmix":
        import tfmix

        tfmix.set_global_policy(POLICY)
    try:
        return [float(loss) for loss in _scripts.train(script)]
    except Exception as error:
        logging.info("%s, %s: %r", script, library, error)
        return [float("nan")]


def trains(own: Sequence[float], in_float32: Sequence[Sequence[float]]) -> bool:
    """Returns whether losses are finite and end where float32's end."""
    low, high = _scripts.bounds([_scripts.final(run) for run in in_float32])
    return bool(np.all(np.isfinite(own)) and low <= _scripts.final(own) <= high)


def counts(trained: Mapping[str, bool]) -> dict[str, int]:
    """Counts whole scripts, and layers or steps that are rows of a file."""
    whole = {
        name for name, path in _scripts.places().items() if path.stem == name
    }
    parts = set(trained) - whole
    return {
        "whole scripts": len(whole),
        "train": sum(trained[name] for name in whole),
        "single layers and steps": len(parts),
        "these train": sum(trained[name] for name in parts),
    }


def table() -> results.Table:
    """Counts the scripts that train under each library."""
    found = {
        library: answers.answer_of("benchmarks.wild", f"--child={library}")
        for library in results.track(("float32", *LIBRARIES), "libraries")
    }
    rows = []
    for library in LIBRARIES:
        trained = {
            script: trains(own, found["float32"][script])
            for script, (own, *_) in found[library].items()
        }
        rows.append({"library": library, **counts(trained)})
    return results.Table(f"Scripts with one line on top, {POLICY}", rows)


FLAGS = results.flag_values()
flags.DEFINE_string(
    "child", None, "the part of a process of its own", flag_values=FLAGS
)


def main() -> int:
    """Parses, runs, prints; returns 1 if a script fails under tfmix."""
    results.parse(FLAGS)
    if FLAGS.child:
        seeds = SEEDS if FLAGS.child == "float32" else SEEDS[:1]
        answers.answer(
            {
                script: [losses(script, FLAGS.child, seed) for seed in seeds]
                for script in _scripts.places()
            }
        )
        return 0
    how = "one seed beside three of float32"
    (made,) = results.measure("wild", FLAGS, lambda: [table()], how)
    last = made.rows[-1]
    missing = last["whole scripts"] - last["train"]
    missing += last["single layers and steps"] - last["these train"]
    return int(missing > 0)


if __name__ == "__main__":
    results.start(main, FLAGS)
