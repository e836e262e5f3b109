"""Counts how many scripts, as people write them, train in 16 bit.

python -m benchmarks.wild [--json] [--save=docs]

Each script of `tests/wild` runs in graph mode under mixed_float16, once after
Keras's `set_dtype_policy` and once after `tfmix.set_global_policy`, in separate
processes. A script trains if it ends and all of its losses are finite.
"""

import math

import keras
from absl import flags, logging

from benchmarks import answers, results
from tests.wild import _scripts

LIBRARIES = ("Keras", "tfmix")
POLICY = "mixed_float16"


def trains(script: str, library: str) -> bool:
    """Returns whether a script trains after the one line."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    if library == "Keras":
        keras.config.set_dtype_policy(POLICY)
    else:
        import tfmix

        tfmix.set_global_policy(POLICY)
    try:
        losses = _scripts.train(script)
    except Exception as error:
        logging.info("%s, %s: %r", script, library, error)
        return False
    return all(map(math.isfinite, losses))


def table() -> results.Table:
    """Counts the scripts that train under each library."""
    rows = []
    for library in results.track(LIBRARIES, "libraries"):
        found = answers.answer_of("benchmarks.wild", f"--child={library}")
        rows.append(
            {"library": library, "scripts": len(found), "train": sum(found)}
        )
    return results.Table(f"Scripts with one line on top, {POLICY}", rows)


FLAGS = results.flag_values()
flags.DEFINE_string(
    "child", None, "the part of a process of its own", flag_values=FLAGS
)


def main() -> int:
    """Parses, runs, prints; returns 1 if a script fails under tfmix."""
    results.parse(FLAGS)
    if FLAGS.child:
        answers.answer([trains(one, FLAGS.child) for one in _scripts.places()])
        return 0
    (made,) = results.measure("wild", FLAGS, lambda: [table()], "seed 1")
    counts = made.rows[-1]
    return int(counts["train"] != counts["scripts"])


if __name__ == "__main__":
    results.start(main, FLAGS)
