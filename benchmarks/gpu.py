"""Mixed precision on a GPU: speed, memory, and what tfmix's parts cost there.

    python -m benchmarks.gpu [--models=NAME,...] [--precisions=NAME,...]
        [--runs 9] [--steps 50] [--dry_run] [--json] [--save=docs]

ResNet-50, a transformer encoder of 12 layers, an LSTM and a head over 50,304
words, trained by `fit` in float32 without and with TF32, under both mixed
policies, and in pure bfloat16 with masters; KERAS_BACKEND picks the backend.
Each precision has a process, and they take turns on the GPU. Under JAX the
transformer is written by hand as well, as the best that can be had.

Without a GPU nothing is measured and what was measured before is kept.
`--dry_run` goes through all of it in this process, with tiny models on
whatever there is; its figures mean nothing and are never saved.
"""

import contextlib
import functools
import os
import sys
from collections.abc import Mapping
from typing import Any

from absl import flags

from benchmarks import pairs, results, turns

MODELS = ("resnet50", "transformer", "lstm", "head")
PRECISIONS = (
    "float32",
    "float32, TF32",
    "mixed_float16",
    "mixed_bfloat16",
    "bfloat16, masters",
)
HAND_WRITTEN = "hand-written"
# What all others are compared with.
BASE = "float32"
# What loss scaling and the monitors are measured on.
SCALED = "mixed_float16"
VARIANTS = ("no loss scaling", "LossScaleMonitor", "NumericsMonitor")
NOTE = (
    "Ratio: speed over float32 without TF32, turn by turn. Share: of the "
    "bfloat16 matrix product rate, {rate:.0f} TFLOP/s here, counting layers' "
    "products only."
)
# Anything with `ask`: a worker, or a session in this process.
Workers = Mapping[str, Any]


def names_of(model: str, backend: str) -> list[str]:
    """Returns the rows that a model has under a backend."""
    by_hand = model == "transformer" and backend == "jax"
    return [*PRECISIONS, HAND_WRITTEN] if by_hand else list(PRECISIONS)


def speeds(workers: Workers, runs: int, steps: int) -> dict[str, list[float]]:
    """Returns seconds per step by precision; they take turns."""
    return pairs.in_turns(
        {
            name: functools.partial(worker.ask, what="seconds", steps=steps)
            for name, worker in workers.items()
        },
        runs,
    )


def precision_table(
    title: str,
    workers: Workers,
    seconds: dict[str, list[float]],
    units: tuple[str, int],
    rate: float,
) -> results.Table:
    """Returns a row per precision.

    Args:
        title: The table's title.
        workers: By precision, after their steps.
        seconds: Per step, by precision, turn by turn.
        units: What is counted, and how many a step takes.
        rate: Of the device's matrix products, in FLOP/s.
    """
    unit, per_step = units
    flops = workers[BASE].ask(what="flops")
    rows = []
    for name, own in seconds.items():
        peak = workers[name].ask(what="peak")
        rows.append(
            {
                "precision": name,
                f"{unit} per second": results.spread(
                    [per_step / each for each in own]
                ),
                "ratio": results.spread(pairs.ratios(seconds[BASE], own)),
                "peak, GB": None if peak is None else peak / 1e9,
                "share, %": results.spread(
                    [100 * flops / each / rate for each in own]
                ),
            }
        )
    return results.Table(title, rows, NOTE.format(rate=rate / 1e12))


def parts_table(
    title: str, worker: Any, runs: int, steps: int
) -> results.Table:
    """Returns what loss scaling and each monitor cost, turn by turn."""
    rows = []
    for variant in VARIANTS:
        ask = functools.partial(worker.ask, what="seconds", steps=steps)
        other = functools.partial(ask, variant=variant)
        times = pairs.in_turns({"plain": ask, "other": other}, runs)
        scaling = variant == VARIANTS[0]
        order = ("plain", "other") if scaling else ("other", "plain")
        ratios = pairs.ratios(*(times[name] for name in order))
        costs = [100 * (ratio - 1.0) for ratio in ratios]
        what = "loss scaling and guard" if scaling else variant
        rows.append({"part": what, "cost, % of a step": results.spread(costs)})
    note = "Against the same model without it; NumericsMonitor(every=100)."
    return results.Table(title, rows, note)


def tables_of(model: str, workers: Workers) -> list[results.Table]:
    """Measures one model; returns its tables."""
    from benchmarks import gpu_models

    runs, steps = FLAGS.runs, FLAGS.steps
    rate = workers[BASE].ask(what="matmul")
    seconds = speeds(workers, runs, steps)
    task = gpu_models.task(model, FLAGS.dry_run)
    units = task.unit, task.per_row * task.batch_size
    title = f"{model}, batch {task.batch_size}"
    first = precision_table(title, workers, seconds, units, rate)
    if SCALED not in workers:
        return [first]
    title = f"{model}: parts, {SCALED}"
    # Twice 50 steps hold one sample of the monitor that looks at every 100th.
    return [first, parts_table(title, workers[SCALED], runs, 2 * steps)]


def started(
    model: str, names: list[str], stop: contextlib.ExitStack
) -> dict[str, turns.Worker]:
    """Starts a process per precision."""
    return {
        name: stop.enter_context(
            turns.Worker("benchmarks.gpu_worker", [model, name])
        )
        for name in names
    }


def sessions(model: str, names: list[str]) -> dict[str, Any]:
    """Returns tiny sessions in this process."""
    from benchmarks import gpu_reference, gpu_worker

    return {
        name: gpu_reference.Session(tiny=True)
        if name == HAND_WRITTEN
        else gpu_worker.Session(model, name, tiny=True)
        for name in names
    }


def found_gpu() -> str | None:
    """Returns the GPU's name; asked in a process that gives it free again."""
    with turns.Worker("benchmarks.gpu_worker", ["any", "device"]) as worker:
        return worker.ask()


FLAGS = results.flag_values()
results.add_names(FLAGS, "models", MODELS, MODELS, "which models")
_EVERY = (*PRECISIONS, HAND_WRITTEN)
results.add_names(
    FLAGS, "precisions", _EVERY, _EVERY, f"{BASE} is always measured"
)
flags.DEFINE_integer("runs", 9, "turns", lower_bound=1, flag_values=FLAGS)
flags.DEFINE_integer("steps", 50, "of a turn", lower_bound=1, flag_values=FLAGS)
flags.DEFINE_bool("dry_run", False, "tiny models, no GPU", flag_values=FLAGS)
flags.register_multi_flags_validator(
    ["dry_run", "save"],
    lambda asked: not (asked["dry_run"] and asked["save"]),
    "--dry_run measures nothing that could be saved",
    flag_values=FLAGS,
)


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints and, if asked, keeps a result per model."""
    words = sys.argv[1:] if arguments is None else arguments
    results.parse(FLAGS, words)
    backend = os.environ.get("KERAS_BACKEND", "tensorflow")
    gpu = "dry run, no figures" if FLAGS.dry_run else found_gpu()
    if gpu is None:
        print(
            f"No GPU under {backend}: nothing is measured, the last result is "
            "kept. `--dry_run` tries the script without one."
        )
        return 0
    how = (
        f"seed 0; median and extremes of {FLAGS.runs} turns of "
        f"{FLAGS.steps} steps"
    )
    for model in results.track(FLAGS.models, "models"):
        run = results.Run(f"gpu/{model}", words, backend, how)
        chosen = {BASE, *FLAGS.precisions}
        names = [n for n in names_of(model, backend) if n in chosen]
        with contextlib.ExitStack() as stop:
            workers = (
                sessions(model, names)
                if FLAGS.dry_run
                else started(model, names, stop)
            )
            record = run.record(tables_of(model, workers))
        record["machine"]["gpu"] = gpu
        results.publish(record, FLAGS)
    return 0


if __name__ == "__main__":
    results.start(main, FLAGS)
