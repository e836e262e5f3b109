"""Compares the ways of pure 16-bit training to keep the lost bits.

    python -m benchmarks.master            # the table, five seeds
    python -m benchmarks.master --seeds 1  # a quick look

The task is `benchmarks.digits`. Bytes are counted from the variables.
"""

import math
from collections.abc import Callable

import keras
from absl import flags

import tfmix
from benchmarks import digits, results

# The values are the policy of the layers and the wrapper of Adam.
_MASTERS = tfmix.optimizers.MasterWeightOptimizer
VARIANTS: dict[str, tuple[str, Callable]] = {
    "float32": ("float32", lambda adam: adam),
    "mixed": ("mixed_bfloat16", lambda adam: adam),
    "pure, no masters": ("bfloat16", lambda adam: adam),
    "masters": ("bfloat16", _MASTERS),
    "stochastic": ("bfloat16", tfmix.optimizers.BFloat16Optimizer),
}


def bytes_per_parameter(model: keras.Model) -> tuple[float, float]:
    """Returns the bytes per weight, and those of its optimizer state."""

    def size(variables: list) -> int:
        return sum(v.value.dtype.size * math.prod(v.shape) for v in variables)

    optimizer = model.optimizer
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    known = {v.path for v in inner.variables}
    own = [v for v in optimizer.variables if v.path not in known]
    count = sum(math.prod(v.shape) for v in model.trainable_variables)
    weights = size(model.trainable_variables) + size(own)
    return weights / count, (weights + size(inner.variables)) / count


def run_task(seeds: int) -> results.Table:
    """Returns the table of the task."""
    rows = []
    for name, (policy, around) in VARIANTS.items():
        scores = []
        for seed in range(seeds):
            adam = around(keras.optimizers.Adam(1e-3))
            # `compile` would add masters under bfloat16.
            model, score = digits.train(
                adam, seed, policy, wraps=False, jit_compile=False
            )
            scores.append(score)
        weights, state = bytes_per_parameter(model)
        rows.append(
            {
                "variant": name,
                "accuracy in %": results.mean(scores),
                "bytes a weight": weights,
                "with Adam's state": state,
            }
        )
    note = "Score: accuracy in percent on the last 360 images."
    return results.Table("Digits", rows, note)


FLAGS = results.flag_values()
flags.DEFINE_integer("seeds", 5, "runs of each task", flag_values=FLAGS)


def tables() -> list[results.Table]:
    """Measures the task."""
    return [run_task(FLAGS.seeds)]


if __name__ == "__main__":
    how = "{seeds} seeds; mean and standard deviation"
    results.run("master", FLAGS, tables, how)
