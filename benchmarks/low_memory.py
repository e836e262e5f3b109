"""Compares training with 8-bit optimizer state and with float32 state.

    python -m benchmarks.low_memory            # all of it, five seeds
    python -m benchmarks.low_memory --seeds 2 --part digits

The tasks are digits (scikit-learn), accuracy in percent; sunspots
(statsmodels), R2 in percent; and the language of a text by a small transformer
(Django's catalogues), accuracy in percent. All state is in 8 bits, also that of
small variables and of embeddings, which are float32 by default. Then follow
twenty thousand steps that are hard on purpose, and the time of Adam's step
under XLA.
"""

import dataclasses
import functools
import pathlib
import statistics
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from absl import flags, logging
from keras import ops

from benchmarks import languages, master, overhead_steps, results
from tfmix.optimizers import low_memory

OPTIMIZERS: dict[str, Callable[[float], Any]] = {
    "Adam": keras.optimizers.Adam,
    "AdamW": keras.optimizers.AdamW,
    # Lion usually takes a third of Adam's rate, and SGD ten times it.
    "Lion": lambda rate: keras.optimizers.Lion(rate / 3),
    "SGD, momentum": lambda rate: keras.optimizers.SGD(
        10 * rate, momentum=0.9, clipnorm=1.0
    ),
}
SLOTS: dict[str, Callable[[Any], Any]] = {
    "float32": lambda optimizer: optimizer,
    "8 bits": lambda optimizer: low_memory.LowMemoryOptimizer(
        optimizer, [("", "int8")], seed=1
    ),
}
STEPS = 20_000


@dataclasses.dataclass(frozen=True)
class Task:
    """Data, a function that trains on it, and the score."""

    title: str
    rate: float
    train: Callable[[Any, int], tuple[float, list[float]]]


def _fit(task: master.Task, optimizer: Any, seed: int) -> Any:
    keras.utils.set_random_seed(seed)
    model = task.model("float32")
    of_classes = "sparse_categorical_crossentropy"
    loss = "mse" if task.name == "sunspots" else of_classes
    model.compile(optimizer, loss=loss)
    history = model.fit(
        *task.train, batch_size=32, epochs=task.epochs, verbose=0
    )
    predicted = model.predict(task.test[0], verbose=0)
    return task.score(predicted, task.test[1]), history.history["loss"]


def _fit_transformer(optimizer: Any, seed: int) -> Any:
    data = languages.texts()
    keras.utils.set_random_seed(seed)
    model = languages.build_model()
    model.compile(
        optimizer,
        loss="sparse_categorical_crossentropy",
        jit_compile=languages.compiled(),
    )
    losses = languages.fit(model, seed)
    predicted = model.predict(data[1], verbose=0).argmax(axis=-1)
    return 100 * float(np.mean(predicted == data[3])), losses


def tasks() -> dict[str, Task]:
    """Returns the tasks by name."""
    digits, sunspots = master.digits(), master.sunspots()
    return {
        "digits": Task(
            "Digits, accuracy in %", 1e-3, functools.partial(_fit, digits)
        ),
        "sunspots": Task(
            "Sunspots, R2 in %", 1e-2, functools.partial(_fit, sunspots)
        ),
        "transformer": Task(
            "Language of a text, accuracy in %",
            languages.RATE,
            _fit_transformer,
        ),
    }


def measure(
    task: Task, seeds: int
) -> tuple[results.Table, dict[tuple[str, str], np.ndarray]]:
    """Returns the table of a task, and the losses of each way to train."""
    rows, curves = [], {}
    for name in results.track(OPTIMIZERS, task.title):
        scores = {}
        for slots, around in SLOTS.items():
            runs = [
                task.train(around(OPTIMIZERS[name](task.rate)), seed)
                for seed in range(seeds)
            ]
            scores[slots] = [score for score, _ in runs]
            curves[name, slots] = np.array([losses for _, losses in runs])
        rows.append(_row(name, scores))
    return results.Table(task.title, rows), curves


def _row(
    name: str, scores: dict[str, list[float]], allowed: float = 1.0
) -> dict[str, Any]:
    mean = {slots: statistics.mean(each) for slots, each in scores.items()}
    noise = {slots: statistics.stdev(each) for slots, each in scores.items()}
    difference = mean["8 bits"] - mean["float32"]
    within = abs(difference) <= allowed * noise["float32"]
    return {
        "optimizer": name,
        "slots in float32": f"{mean['float32']:.2f} ± {noise['float32']:.2f}",
        "in 8 bits": f"{mean['8 bits']:.2f} ± {noise['8 bits']:.2f}",
        "difference": f"{difference:+.2f}",
        f"within {allowed:g} x the noise": within,
    }


def draw(curves: dict[str, dict], folder: pathlib.Path) -> pathlib.Path:
    """Draws the mean loss curves of all tasks."""
    from matplotlib import figure

    drawn = figure.Figure(figsize=(13, 4), layout="constrained")
    panels = drawn.subplots(1, len(curves), squeeze=False)[0]
    for panel, (title, of_task) in zip(panels, curves.items(), strict=True):
        for number, name in enumerate(OPTIMIZERS):
            for slots, style in zip(SLOTS, ("-", ":"), strict=True):
                losses = of_task[name, slots].mean(axis=0)
                panel.plot(
                    np.arange(1, len(losses) + 1),
                    losses,
                    style,
                    color=f"C{number}",
                    label=f"{name}, {slots}",
                )
        panel.set(title=title.split(",")[0], yscale="log", xlabel="epoch")
    panels[0].set_ylabel("training loss, mean of the seeds")
    panels[-1].legend(fontsize="small")
    path = folder / "low-memory.png"
    drawn.savefig(path, dpi=110)
    return path


# In the hard run, each variable has its own target, and gradients with noise as
# large as the initial distance. One row of a table only gets a gradient every
# 500 steps. Another variable has gradients of 1e-12 and 1e3 in turn, in one
# block. The last one is frozen for a quarter of the run.
_SHAPE, _RARE, _EVERY = (64, 64), 7, 500


def _gradient(kind: str, value: Any, aim: Any, noise: Any, step: Any) -> Any:
    gradient = value - aim + noise
    if kind == "rare row":
        row = ops.arange(_SHAPE[0])[:, None] != _RARE
        met = ops.logical_or(row, ops.equal(step % _EVERY, 0))
        return ops.where(met, gradient, 0.0)
    if kind == "1e-12 by 1e3":
        small = ops.arange(_SHAPE[1]) % 2 == 0
        return gradient * ops.where(small, 1e-12, 1e3)
    return gradient


KINDS = ("rare row", "1e-12 by 1e3", "frozen")


def hard(optimizer: Any, seed: int, steps: int) -> dict[str, float]:
    """Runs the hard steps; returns the remaining distances.

    Returns:
        For each variable, and for the rare row, the root mean square of the
        distance to its target; NaN if any number became NaN.
    """
    random = np.random.default_rng(seed)
    aims = [random.normal(size=_SHAPE).astype("float32") for _ in KINDS]
    variables = [
        keras.Variable(np.zeros(_SHAPE, "float32"), name=kind.split()[0])
        for kind in KINDS
    ]
    optimizer.build(variables)
    on_jax = keras.backend.backend() == "jax"
    run = _run_by_jax if on_jax else _run_by_tensorflow
    far = {
        kind: np.asarray(value) - aim
        for kind, value, aim in zip(
            KINDS,
            run(optimizer, variables, aims, seed, steps),
            aims,
            strict=True,
        )
    }
    far["rare row, itself"] = far["rare row"][_RARE]
    return {
        kind: float(np.sqrt(np.mean(np.square(each))))
        for kind, each in far.items()
    }


def _gradients(values: list, aims: list, noise: Any, step: Any) -> list:
    return [
        _gradient(kind, *of_one, step)
        for kind, *of_one in zip(KINDS, values, aims, noise, strict=True)
    ]


def _is_thawed(step: Any, steps: int) -> Any:
    """Returns whether the last variable trains: not in the second quarter."""
    return ops.logical_or(step < steps // 4, step >= steps // 2)


def _run_by_jax(
    optimizer: Any, variables: list, aims: list, seed: int, steps: int
) -> list:
    import jax

    def one(state: Any, step: Any) -> Any:
        held, values = state
        key = jax.random.fold_in(jax.random.key(seed), step)
        noise = jax.random.normal(key, (len(KINDS), *_SHAPE))
        gradients = _gradients(values, aims, noise, step)
        after, held = optimizer.stateless_apply(held, gradients, values)
        thawed = _is_thawed(step, steps)
        after[-1] = ops.where(thawed, after[-1], values[-1])
        return (held, after), None

    state = [v.value for v in optimizer.variables], [v.value for v in variables]
    run = jax.jit(lambda state: jax.lax.scan(one, state, np.arange(steps))[0])
    return list(run(state)[1])


def _run_by_tensorflow(
    optimizer: Any, variables: list, aims: list, seed: int, steps: int
) -> list:
    import tensorflow as tf

    def one(step: Any) -> Any:
        noise = tf.random.stateless_normal(
            (len(KINDS), *_SHAPE), tf.stack([seed, step])
        )
        values = [tf.identity(variable.value) for variable in variables]
        gradients = _gradients(values, aims, tf.unstack(noise), step)
        optimizer.apply(gradients, variables)
        frozen = variables[-1]
        thawed = _is_thawed(step, steps)
        frozen.assign(tf.where(thawed, frozen.value, values[-1]))
        return step + 1

    @tf.function(jit_compile=True, autograph=False)
    def run() -> None:
        tf.while_loop(lambda step: step < steps, one, [tf.constant(0)])

    run()
    return [variable.numpy() for variable in variables]


def measure_hard(seeds: int, steps: int = STEPS) -> results.Table:
    """Returns the table of the hard run."""
    rows = []
    for name in results.track(OPTIMIZERS, "hard steps"):
        found = {
            slots: [
                hard(around(OPTIMIZERS[name](1e-3)), seed, steps)
                for seed in range(seeds)
            ]
            for slots, around in SLOTS.items()
        }
        for kind in found["float32"][0]:
            scores = {
                slots: [100 * run[kind] for run in runs]
                for slots, runs in found.items()
            }
            rows.append(_row(f"{name}: {kind}", scores, allowed=2.0))
    return results.Table(
        f"{steps:,} hard steps, distance to the aim in %",
        rows,
        "A row met once in 500 steps; gradients of 1e-12 and 1e3 in turn; a "
        "variable left alone for a quarter of the steps.",
    )


# The values are layers, width, and steps in a turn.
_TIMED = {"200 x 256 x 256": (200, 256, 4), "6 x 2048 x 2048": (6, 2048, 2)}
_WAYS = ("bare", "8 bits")


def _whole_step(way: str, layers: int, width: int) -> Callable[[], Any]:
    """Returns a step of dense layers, forward to update, a batch of 64."""
    stack = [keras.layers.Dense(width, "relu") for _ in range(layers)]
    model = keras.Sequential([keras.Input((width,)), *stack])
    optimizer = overhead_steps.WAYS[way](keras.optimizers.Adam())
    model.compile(optimizer, "mse", jit_compile=True)
    x = np.ones((64, width), "float32")
    return lambda: model.train_on_batch(x, x)


def measure_time(runs: int = 40) -> results.Table:
    """Returns the table of Adam's steps under XLA, in alternating turns."""
    on_jax = keras.backend.backend() == "jax"
    rows = []
    for name, (layers, width, repeats) in results.track(_TIMED.items(), "time"):
        steps = {
            "optimizer": lambda way, *size: (
                overhead_steps.jax_step(way, size)
                if on_jax
                else overhead_steps.tensorflow_step(way, size, True)
            ),
            "training step": _whole_step,
        }
        for what, make in steps.items():
            made = {way: make(way, layers, width) for way in _WAYS}
            found = overhead_steps.in_turns({}, made, repeats, runs)
            rows.append(
                {"model": name, "timed": what}
                | {f"{row['system']}, ms": row["ms"] for row in found}
                | {"ratio": found[-1]["ratio"]}
            )
    return results.Table("Adam's steps under XLA on this CPU", rows)


FLAGS = results.flag_values()
_PARTS = ("digits", "sunspots", "transformer", "hard", "time")
flags.DEFINE_integer("seeds", 5, "runs of each task", flag_values=FLAGS)
flags.DEFINE_integer("steps", STEPS, "of the hard task", flag_values=FLAGS)
results.add_names(FLAGS, "part", _PARTS, _PARTS, "what to measure")


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark of the command line."""
    words = sys.argv[1:] if arguments is None else arguments
    results.parse(FLAGS, words)
    run = results.Run(
        "low_memory",
        words,
        keras.backend.backend(),
        f"seeds 0 to {FLAGS.seeds - 1}; mean and standard deviation",
    )
    tables, curves = [], {}
    for name, task in tasks().items():
        if name in FLAGS.part:
            table, curves[task.title] = measure(task, FLAGS.seeds)
            tables.append(table)
    if "hard" in FLAGS.part:
        tables.append(measure_hard(FLAGS.seeds, FLAGS.steps))
    if "time" in FLAGS.part:
        tables.append(measure_time())
    if FLAGS.save and curves:
        picture = draw(curves, pathlib.Path(FLAGS.save))
        logging.info("picture: %s", picture)
    results.publish(run.record(tables), FLAGS)
    return 0


if __name__ == "__main__":
    results.start(main, FLAGS)
