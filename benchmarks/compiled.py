"""Counts kernels and bytes of steps compiled for other accelerators.

python -m benchmarks.compiled [--part=NAME,...] [--json] [--save=docs]

XLA's compilers for GPUs and TPUs run without a device (the extras `[nvidia]`
and `[tpu]`, or `make targets`). Nothing is timed; the numbers are counted in
the compiled programs.
"""

import multiprocessing
import os
import sys
from collections.abc import Callable
from concurrent import futures
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import keras

import tfmix
from benchmarks import compiled_steps, results
from tfmix.hardware import compilers
from tfmix.hardware import target as targets

MODELS = {
    "6 x 2048 x 2048": compiled_steps.FEW_LARGE,
    "200 x 256 x 256": compiled_steps.MANY_SMALL,
}
ON_JAX = keras.backend.backend() == "jax"
Rows = list[dict[str, Any]]


def steps(target: str, inner: str = "Adam") -> results.Table:
    """One optimizer's step under each scaler, on both lists of variables."""
    rows: Rows = []
    for model, shapes in MODELS.items():
        for way, wrap in compiled_steps.WRAPPERS.items():
            optimizer = wrap(getattr(keras.optimizers, inner)())
            made = compiled_steps.compiled(optimizer, shapes, target)
            row = {"model": model, "optimizer": way, **compiled_steps.row(made)}
            if targets.find(target).kind == "TPU":
                row["GB accessed"] = made.accessed / 1e9
            rows.append(row)
    return results.Table(f"One {inner} step, compiled for {target}", rows)


def pure() -> results.Table:
    """Ways to keep the bits that bfloat16 variables lose."""
    adam = keras.optimizers.Adam
    ways: dict[str, Callable[[], Any]] = {
        "bare": adam,
        "masters": lambda: tfmix.optimizers.MasterWeightOptimizer(adam()),
        "split": lambda: tfmix.optimizers.MasterWeightOptimizer(
            adam(), split=True
        ),
        "stochastic": lambda: tfmix.optimizers.BFloat16Optimizer(
            adam(), seed=1
        ),
        "masters in tfmix": lambda: tfmix.LossScaleOptimizer(
            tfmix.optimizers.MasterWeightOptimizer(adam())
        ),
    }
    rows: Rows = []
    for model, shapes in MODELS.items():
        for way, make in ways.items():
            made = compiled_steps.compiled(make(), shapes, "h200", "bfloat16")
            names = {"model": model, "optimizer": way}
            rows.append(names | compiled_steps.row(made))
    return results.Table("Adam on bfloat16 variables, for h200", rows)


def sparse() -> results.Table:
    """A sparse gradient under each scaler."""
    rows: Rows = []
    for inner in ("SGD", "Adagrad"):
        for way, wrap in compiled_steps.WRAPPERS.items():
            optimizer = wrap(getattr(keras.optimizers, inner)())
            made = compiled_steps.sparse(optimizer, "h200")
            names = {"optimizer": f"{inner}, {way}"}
            rows.append(names | compiled_steps.row(made))
    title = "1024 rows of a 1,000,000 x 64 table, compiled for h200"
    return results.Table(title, rows)


def everywhere() -> results.Table:
    """The step on few large variables, on each target."""
    rows: Rows = []
    for target in targets.targets():
        for way in ("bare", "tfmix"):
            adam = compiled_steps.WRAPPERS[way](keras.optimizers.Adam())
            made = compiled_steps.compiled(
                adam, compiled_steps.FEW_LARGE, target.name
            )
            names = {"target": target.name, "optimizer": way}
            rows.append(names | compiled_steps.row(made))
    return results.Table("One Adam step on 6 x 2048 x 2048 everywhere", rows)


def whole(target: str, devices: int = 1) -> results.Table:
    """A transformer's training step under policies and scalers."""
    float16 = [("mixed_float16", way) for way in compiled_steps.WRAPPERS]
    pairs = [("float32", "bare"), ("mixed_bfloat16", "bare")]
    pairs += [("mixed_bfloat16", "Keras"), ("mixed_bfloat16", "tfmix")]
    if targets.find(target).kind == "GPU":
        pairs[1:] = [*float16, ("mixed_bfloat16", "bare")]
    pairs.append(("bfloat16", "tfmix"))
    rows: Rows = []
    for policy, way in pairs:
        step = compiled_steps.transformer(policy, way, target, devices)
        names = {"policy": policy, "optimizer": way}
        rows.append(names | compiled_steps.whole_row(step))
    many = f"{devices} x " if devices > 1 else ""
    title = f"A transformer's training step, 4 blocks, for {many}{target}"
    return results.Table(title, rows)


def chips() -> results.Table:
    """The exchanges that scaling adds between many chips."""
    rows: Rows = []
    for devices in (4, 64, 256):
        for way in compiled_steps.WRAPPERS:
            step = compiled_steps.transformer(
                "mixed_bfloat16", way, "v5e", devices
            )
            rows.append(
                {
                    "chips": devices,
                    "optimizer": way,
                    "exchanges": step.exchanges,
                    "bytes exchanged": step.exchanged,
                    "conditionals": step.conditionals,
                }
            )
    title = "The transformer on v5e, mixed_bfloat16, data parallel"
    return results.Table(title, rows)


PARTS: dict[str, Callable[[], results.Table]] = {
    "h200": lambda: steps("h200"),
    "v5e": lambda: steps("v5e"),
    "sgd": lambda: steps("h200", "SGD"),
    "adamw": lambda: steps("h200", "AdamW"),
    "muon": lambda: steps("h200", "Muon"),
    "pure": pure,
    "everywhere": everywhere,
    "transformer": lambda: whole("h200"),
    "transformer-v5e": lambda: whole("v5e", 4 if ON_JAX else 1),
}
# Only TensorFlow has sparse gradients, and only JAX several devices.
PARTS |= {"chips": chips} if ON_JAX else {"sparse": sparse}


def _table(part: str) -> results.Table:
    return PARTS[part]()


def compilers_there(*names: str) -> bool:
    """Returns whether all compilers are installed; names missing ones."""
    lacking = {
        module
        for name in names
        for module in compilers.missing(targets.find(name))
    }
    if lacking:
        print(
            f"tfmix: nothing compiled: there is no "
            f"{', '.join(sorted(lacking))}. `make targets` makes an "
            "environment with all of them.",
            file=sys.stderr,
        )
    return not lacking


FLAGS = results.flag_values()
results.add_names(FLAGS, "part", PARTS, PARTS, "what to compile")


def main(arguments: list[str] | None = None) -> int:
    """Parses, compiles, prints."""
    words = sys.argv[1:] if arguments is None else arguments
    results.parse(FLAGS, words)
    if not compilers_there("h200", "v5e"):
        return 0
    run = results.Run("compiled", words, keras.backend.backend())
    # Each part has its own process, because all programs together would need
    # too much memory.
    with futures.ProcessPoolExecutor(
        1, multiprocessing.get_context("spawn"), max_tasks_per_child=1
    ) as pool:
        made = pool.map(_table, FLAGS.part)
        found = results.track(made, "parts", len(FLAGS.part))
        results.publish(run.record(list(found)), FLAGS)
    return 0


if __name__ == "__main__":
    results.start(main, FLAGS)
