"""Trains small networks on real data of several kinds, in every precision.

python -m benchmarks.real_data [--only=NAME,...] [--json] [--save=docs]

The extra `[real-data]` installs the data. Every network trains from three seeds
in float32, under Keras's own policy and under tfmix's, each in a process of its
own, because tfmix changes Keras's `compile`. Exit code 1 if all seeds of tfmix
are worse than all of float32's.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
from absl import flags

from benchmarks import answers, real_tasks, results

SEEDS = (0, 1, 2)
WAYS = {
    "float32": ("Keras", "float32"),
    "Keras, float16": ("Keras", "mixed_float16"),
    "tfmix, float16": ("tfmix", "mixed_float16"),
    "tfmix, bfloat16": ("tfmix", "mixed_bfloat16"),
}


def trained(name: str, way: str, seed: int) -> list[float]:
    """Trains a network; returns its score after each round."""
    library, policy = WAYS[way]
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    if library == "tfmix":
        import tfmix

        tfmix.set_global_policy(policy)
    else:
        keras.config.set_dtype_policy(policy)
    task = real_tasks.TASKS[name]
    data = task.data()
    model = task.make(data)
    scores = []

    def score(epoch: int, logs: Any) -> None:
        if (epoch + 1) % task.epochs == 0:
            predicted = model.predict(data.test_x, batch_size=512, verbose=0)
            scores.append(task.score(predicted, data.test_y))

    model.fit(
        data.x,
        data.y,
        sample_weight=data.weights,
        batch_size=task.batch_size,
        epochs=task.rounds * task.epochs,
        callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=score)],
        verbose=0,
    )
    return scores


def is_worse(scores: Sequence[float], than: Sequence[float]) -> bool:
    """Returns whether the best of some runs is worse than the worst of others.

    A score that is not finite is the worst.
    """
    best = max(score if math.isfinite(score) else -math.inf for score in scores)
    return best < min(than)


def epochs_to_target(name: str, runs: Sequence[Sequence[float]]) -> str:
    """Returns the median number of epochs until the target, "-" for never."""
    task = real_tasks.TASKS[name]
    counts = [
        next(
            (
                task.epochs * (place + 1)
                for place, score in enumerate(scores)
                if score >= task.target
            ),
            math.inf,
        )
        for scores in runs
    ]
    median = float(np.median(counts))
    return f"{median:.0f}" if math.isfinite(median) else "-"


def row(
    name: str, found: Mapping[str, Sequence[Sequence[float]]]
) -> dict[str, Any]:
    """Returns the row of a task, from the scores of each way and seed."""
    task = real_tasks.TASKS[name]
    last = {way: [scores[-1] for scores in runs] for way, runs in found.items()}
    cells: dict[str, Any] = {
        "task": task.kind,
        "data": task.source,
        "score (target)": f"{task.metric} ({task.target:g})",
    }
    for way, scores in last.items():
        mark = " (worse)" if is_worse(scores, last["float32"]) else ""
        is_finite = all(map(math.isfinite, scores))
        cells[way] = f"{results.mean(scores) if is_finite else 'nan'}{mark}"
    epochs = [epochs_to_target(name, runs) for runs in found.values()]
    return cells | {"epochs": "/".join(epochs)}


def tables(names: Sequence[str]) -> list[results.Table]:
    """Trains all ways; returns one row for each task."""
    found: dict[str, dict[str, list]] = {name: {} for name in names}
    for way in results.track(WAYS, "precisions"):
        words = f"--child={way}", f"--only={','.join(names)}"
        for name, runs in answers.answers_of("benchmarks.real_data", *words):
            found[name][way] = runs
    title = f"{len(names)} tasks on real data"
    return [results.Table(title, [row(*item) for item in found.items()])]


FLAGS = results.flag_values()
results.add_names(
    FLAGS, "only", real_tasks.TASKS, real_tasks.TASKS, "the tasks"
)
flags.DEFINE_enum(
    "child",
    None,
    [*WAYS],
    "the part of a process of its own",
    flag_values=FLAGS,
)


def main() -> int:
    """Parses, runs, prints; returns 1 if tfmix is worse than float32."""
    results.parse(FLAGS)
    if FLAGS.child:
        for name in FLAGS.only:
            runs = [trained(name, FLAGS.child, seed) for seed in SEEDS]
            answers.answer([name, runs])
        return 0
    how = "seeds 0 to 2; mean and standard deviation after the last epoch"
    (made,) = results.measure(
        "real_data", FLAGS, lambda: tables(FLAGS.only), how
    )
    ours = [way for way in WAYS if way.startswith("tfmix")]
    return int(any("worse" in one[way] for one in made.rows for way in ours))


if __name__ == "__main__":
    results.start(main, FLAGS)
