"""Counts how many scripts, as people write them, train in 16 bit.

python -m benchmarks.wild [--policy mixed_float16] [--json] [--save=docs]

Each script of `tests/wild` runs in graph mode, once after Keras's
`set_dtype_policy` and once after `tfmix.set_global_policy`, in separate
processes. A script trains if it ends and all of its losses are finite.
"""

import math
import os
import pathlib
import runpy
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
from absl import flags

from benchmarks import answers, results

FOLDER = pathlib.Path(__file__).parents[1] / "tests" / "wild"
LIBRARIES = ("Keras", "tfmix")
_TRAINS = "trains"


def scripts() -> list[str]:
    """Returns the names of the scripts that this backend can run."""
    others = {"tensorflow": "jax", "jax": "tensorflow"}
    raw = f"import {others[keras.backend.backend()]}"
    return [
        path.stem
        for path in sorted(FOLDER.glob("*.py"))
        if not path.stem.startswith(("_", "test"))
        and raw not in path.read_text()
    ]


def outcome(script: str, library: str, policy: str) -> str:
    """Runs a script after the one line; describes how it ended."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    if library == "Keras":
        keras.config.set_dtype_policy(policy)
    else:
        import tfmix

        tfmix.set_global_policy(policy)
    try:
        losses = runpy.run_path(str(FOLDER / f"{script}.py"))["main"]()
    except Exception as error:
        return type(error).__name__
    fine = all(map(math.isfinite, losses))
    return _TRAINS if fine else "not finite"


def all_of(library: str, policy: str) -> dict[str, str]:
    """Returns how each script ends under a library."""
    words = f"--child={library}", f"--policy={policy}"
    return dict(answers.answer_of("benchmarks.wild", *words))


def tables(policy: str) -> list[results.Table]:
    """Returns the number of scripts that train, and the ends of the others."""
    found = {
        library: all_of(library, policy)
        for library in results.track(LIBRARIES, "libraries")
    }
    counts: list[dict[str, Any]] = [
        {
            "library": library,
            "scripts": len(ends),
            "train": sum(end == _TRAINS for end in ends.values()),
        }
        for library, ends in found.items()
    ]
    lost = [
        {"script": name, **{each: found[each][name] for each in LIBRARIES}}
        for name in scripts()
        if any(found[each][name] != _TRAINS for each in LIBRARIES)
    ]
    title = f"Scripts with one line on top, {policy}"
    return [
        results.Table(title, counts),
        results.Table("Those that do not train under both", lost),
    ]


FLAGS = results.flag_values()
flags.DEFINE_string(
    "policy", "mixed_float16", "of every script", flag_values=FLAGS
)
flags.DEFINE_string(
    "child", None, "the part of a process of its own", flag_values=FLAGS
)


def main() -> int:
    """Parses, runs, prints; returns 1 if a script fails under tfmix."""
    results.parse(FLAGS)
    if FLAGS.child:
        how = FLAGS.child, FLAGS.policy
        answers.answer({one: outcome(one, *how) for one in scripts()})
        return 0
    made = results.measure(
        "wild", FLAGS, lambda: tables(FLAGS.policy), "seed 1"
    )
    counts = made[0].rows[-1]
    return int(counts["train"] != counts["scripts"])


if __name__ == "__main__":
    results.start(main, FLAGS)
