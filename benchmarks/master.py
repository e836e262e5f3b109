"""Compares the ways of pure 16-bit training to keep the lost bits.

    python -m benchmarks.master            # the tables, five seeds
    python -m benchmarks.master --seeds 1  # a quick look

The task is digits (scikit-learn) with a small dense net, accuracy in percent on
the last 360 images. Bytes are counted from the variables. Then follow steps of
400 small layers with flat masters over those with plain ones.
"""

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from absl import flags
from keras import ops

from benchmarks import pairs, results
from tfmix.optimizers import bfloat16_optimizer, master_weights


@dataclasses.dataclass(frozen=True)
class Task:
    """Data, a model of one policy and the metric of a benchmark task."""

    train: tuple
    test: tuple
    model: Callable
    score: Callable
    epochs: int


def digits() -> Task:
    """Handwritten digits, a dense net, accuracy in percent."""
    from sklearn import datasets

    images, labels = datasets.load_digits(return_X_y=True)
    images = (images / 16.0).astype("float32")

    def model(policy: str) -> keras.Model:
        return keras.Sequential(
            [
                keras.Input((64,)),
                keras.layers.Dense(64, activation="relu", dtype=policy),
                keras.layers.Dense(10, dtype=policy),
                keras.layers.Activation("softmax", dtype="float32"),
            ]
        )

    def score(predicted: np.ndarray, true: np.ndarray) -> float:
        return 100.0 * float(np.mean(predicted.argmax(axis=-1) == true))

    train, test = (images[:-360], labels[:-360]), (images[-360:], labels[-360:])
    return Task(train, test, model, score, epochs=20)


# The values are the policy of the layers and the wrapper of Adam.
VARIANTS: dict[str, tuple[str, Callable]] = {
    "float32": ("float32", lambda adam: adam),
    "mixed": ("mixed_bfloat16", lambda adam: adam),
    "pure, no masters": ("bfloat16", lambda adam: adam),
    "masters": ("bfloat16", master_weights.MasterWeightOptimizer),
    "flat masters": (
        "bfloat16",
        lambda adam: master_weights.MasterWeightOptimizer(adam, flat=True),
    ),
    "split": (
        "bfloat16",
        lambda adam: master_weights.MasterWeightOptimizer(adam, split=True),
    ),
    "stochastic": ("bfloat16", bfloat16_optimizer.BFloat16Optimizer),
}


def compiled(task: Task, variant: str, seed: int) -> keras.Model:
    """Builds and compiles the model of a task in one variant."""
    policy, around = VARIANTS[variant]
    keras.utils.set_random_seed(seed)
    model = task.model(policy)
    optimizer = around(keras.optimizers.Adam(1e-3))
    optimizer.build(model.trainable_variables)
    loss = "sparse_categorical_crossentropy"
    model.compile(optimizer, loss=loss, jit_compile=False)
    return model


def bytes_per_parameter(model: keras.Model) -> tuple[float, float]:
    """Returns the bytes per weight, and those of its optimizer state."""

    def size(variables: list) -> int:
        return sum(
            int(np.prod(v.shape))
            * np.dtype(str(np.asarray(v.value).dtype)).itemsize
            for v in variables
        )

    optimizer = model.optimizer
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    own = [
        v
        for v in optimizer.variables
        if v.path not in {w.path for w in inner.variables}
    ]
    count = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
    weights = size(model.trainable_variables) + size(own)
    return weights / count, (weights + size(inner.variables)) / count


def run_task(task: Task, seeds: int) -> results.Table:
    """Returns the table of one task."""
    scores: dict[str, list[float]] = {name: [] for name in VARIANTS}
    models = {}
    for seed in range(seeds):
        for name in VARIANTS:
            models[name] = compiled(task, name, seed)
            models[name].fit(
                *task.train, batch_size=32, epochs=task.epochs, verbose=0
            )
            predicted = models[name].predict(task.test[0], verbose=0)
            scores[name].append(task.score(predicted, task.test[1]))
    sizes = {name: bytes_per_parameter(models[name]) for name in VARIANTS}
    rows = []
    for name in VARIANTS:
        deviation = statistics.stdev(scores[name]) if seeds > 1 else 0.0
        rows.append(
            {
                "variant": name,
                "score": f"{statistics.mean(scores[name]):.2f} ± "
                f"{deviation:.2f}",
                "bytes per parameter": sizes[name][0],
                "with slots": sizes[name][1],
            }
        )
    title = f"digits: {task.epochs} epochs, {seeds} seeds"
    note = "Score: accuracy in percent on the last 360 images."
    return results.Table(title, rows, note)


def optimizer_step(flat: bool, layers: int) -> Callable[[], Any]:
    """Returns a graph-mode optimizer step over many small layers."""
    import tensorflow as tf

    shapes = [(8, 8), (8,)] * layers
    random = np.random.default_rng(0)
    variables = [
        keras.Variable(random.normal(size=shape), dtype="bfloat16", name="w")
        for shape in shapes
    ]
    grads = [tf.cast(random.normal(size=shape), "bfloat16") for shape in shapes]
    optimizer = master_weights.MasterWeightOptimizer(
        keras.optimizers.Adam(), flat=flat
    )
    optimizer.build(variables)

    @tf.function(jit_compile=False)
    def step(*grads: Any) -> Any:
        optimizer.apply(list(grads), variables)
        return ops.convert_to_tensor(optimizer.iterations)

    return lambda: int(step(*grads))


def run_steps(
    layers: int = 400, rounds: int = 30, repeats: int = 5
) -> results.Table:
    """Returns the time of the step with flat masters over the plain one's."""
    steps = {flat: optimizer_step(flat, layers) for flat in (False, True)}
    timed = {flat: pairs.timed(step, repeats) for flat, step in steps.items()}
    times = pairs.in_turns(timed, rounds)
    rows = [
        {
            "masters": "flat" if flat else "one by one",
            "ms": results.spread(times[flat]),
            "ratio": results.spread(pairs.ratios(times[flat], times[False])),
        }
        for flat in times
    ]
    title = f"{layers} layers ({2 * layers} variables), Adam, graph mode"
    return results.Table(title, rows)


FLAGS = results.flag_values()
flags.DEFINE_integer("seeds", 5, "runs of each task", flag_values=FLAGS)


def tables() -> list[results.Table]:
    """Measures the task and the steps."""
    return [run_task(digits(), FLAGS.seeds), run_steps()]


def main() -> None:
    """Runs the benchmark of the command line."""
    results.parse(FLAGS)
    seeds = f"seeds 0 to {FLAGS.seeds - 1}"
    how = f"{seeds}; score: mean and standard deviation"
    results.measure("master", FLAGS, tables, how)


if __name__ == "__main__":
    results.start(main, FLAGS)
