"""What an optimizer step becomes on accelerators that are not here.

python -m benchmarks.compiled [--target h200] [--json] [--save]

XLA's own compilers for GPUs and TPUs run here without a device (the extras
`[nvidia]` and `[tpu]`): nothing is timed, all is counted in their programs.
"""

import os
import sys
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import keras

from benchmarks import compiled_steps, results

MODELS = {
    "6 x 2048 x 2048": compiled_steps.FEW_LARGE,
    "200 x 256 x 256": compiled_steps.MANY_SMALL,
}


def step_table(target: str, inner: str = "Adam") -> results.Table:
    """Returns a row for each model and wrapper of one optimizer."""
    rows: list[dict[str, Any]] = []
    for model, shapes in MODELS.items():
        for way, wrap in compiled_steps.WRAPPERS.items():
            optimizer = wrap(getattr(keras.optimizers, inner)())
            made = compiled_steps.compiled(optimizer, shapes, target)
            rows.append(
                {"model": model, "optimizer": way, **compiled_steps.row(made)}
            )
    return results.Table(f"One {inner} step, compiled for {target}", rows)


def main(arguments: list[str] | None = None) -> int:
    """Parses, compiles, prints."""
    words = sys.argv[1:] if arguments is None else arguments
    parser = results.parser("compiled", __doc__)
    parser.add_argument("--target", nargs="*", default=["h200"])
    parser.add_argument("--optimizer", nargs="*", default=["Adam"])
    options = parser.parse_args(words)
    run = results.Run("compiled", words, keras.backend.backend())
    tables = [
        step_table(target, inner)
        for target in options.target
        for inner in options.optimizer
    ]
    results.publish(run.record(tables), options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
