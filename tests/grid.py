"""What users hang on a model, in every combination: the cases of a grid.

Each case trains one small model twice: under a 16-bit policy with batches of
NaN in its data, and in plain Keras without them. What Keras reports, and what
its callbacks decide, must be the same.
"""

import dataclasses
import functools
import itertools
import random

import keras
import numpy as np
from keras import ops

import tfmix

BATCH = 4
BACKEND = keras.backend.backend()


@dataclasses.dataclass(frozen=True)
class Case:
    """One combination; fields are keys of the tables below."""

    mode: str
    model: str
    reports: str
    metric: str
    callback: str
    batches: int
    bad: str
    source: str

    def __str__(self):
        return "-".join(map(str, dataclasses.astuple(self)))


MODES = {
    "eager": {"run_eagerly": True},
    "xla": {"jit_compile": True},
}
if BACKEND == "tensorflow":
    MODES |= {"graph": {"jit_compile": False}, "replicas": {}}


# --- what a model reports, in methods of its own ---------------------------


class Twice(keras.Model):
    """Reports a number of its own, which a skipped step has not."""

    def compute_metrics(self, *args, **kwargs):
        logs = super().compute_metrics(*args, **kwargs)
        return {**logs, "twice": 2.0 * logs["loss"]}


class Nested(keras.Model):
    def get_metrics_result(self):
        return {"all": super().get_metrics_result()}


class Renamed(keras.Model):
    def get_metrics_result(self):
        found = super().get_metrics_result()
        return {f"my_{name}": value for name, value in found.items()}


class OneMore(keras.Model):
    """Adds a metric in its `metrics`, and updates it."""

    @property
    def metrics(self):
        if "_one_more" not in vars(self):
            mean = keras.metrics.Mean(name="targets")
            object.__setattr__(self, "_one_more", mean)
        return [*super().metrics, vars(self)["_one_more"]]

    def compute_metrics(self, x, y, *args, **kwargs):
        for metric in self.metrics:
            if metric.name == "targets":
                metric.update_state(y)
        return super().compute_metrics(x, y, *args, **kwargs)


class AddsLogs(keras.Model):
    """Calls Keras's `train_step`, and returns more."""

    def train_step(self, *args):
        found = super().train_step(*args)
        if BACKEND == "tensorflow":
            return {**found, "answer": ops.convert_to_tensor(42.0)}
        logs, state = found
        return {**logs, "answer": ops.convert_to_tensor(42.0)}, state


REPORTS = {
    "plain": keras.Model,
    "twice": Twice,
    "nested": Nested,
    "renamed": Renamed,
    "one_more": OneMore,
    "adds_logs": AddsLogs,
}


@keras.saving.register_keras_serializable("grid")
class Lowest(keras.metrics.Metric):
    """Starts at another number than zero."""

    def __init__(self, name="lowest", **kwargs):
        super().__init__(name=name, **kwargs)
        self.value = self.add_variable(
            (), keras.initializers.Constant(1e9), name="value"
        )

    def update_state(self, y_true, y_pred, sample_weight=None):
        found = ops.min(ops.cast(y_true, "float32"))
        self.value.assign(ops.minimum(self.value, found))

    def reset_state(self):
        self.value.assign(1e9)

    def result(self):
        return ops.multiply(self.value, 1.0)


METRICS = {
    "none": lambda: None,
    "mae": lambda: ["mae"],
    "lowest": lambda: [Lowest(), "mae"],
    "auc": lambda: [keras.metrics.RootMeanSquaredError()],
}


# --- what a model is made of, and how it came about ------------------------


@keras.saving.register_keras_serializable("grid")
class JoinsInCall(keras.layers.Layer):
    def call(self, x):
        return keras.layers.concatenate([x, 1.0 - x])


def _layers():
    return [keras.layers.Dense(4), keras.layers.Dense(1, dtype="float32")]


def _graph(kind, *before):
    inputs = x = keras.Input((3,))
    for layer in [*before, *_layers()]:
        x = layer(x)
    return kind(inputs, x)


def _wrapped(kind):
    inner = _graph(keras.Model)
    inputs = keras.Input((3,))
    return kind(inputs, inner(inputs))


def _cloned(kind):
    first = _graph(kind)
    copy = keras.models.clone_model(first)
    copy.set_weights(first.get_weights())
    return copy


def _frozen(kind):
    model = _graph(kind)
    model.layers[1].trainable = False
    return model


MODELS = {
    "graph": _graph,
    "normalised": lambda k: _graph(k, keras.layers.BatchNormalization()),
    "joined": lambda k: _graph(k, JoinsInCall()),
    "wrapped": _wrapped,
    "cloned": _cloned,
    "frozen": _frozen,
}


# --- what decides ----------------------------------------------------------


class Seen(keras.callbacks.Callback):
    """Keeps what a callback of a user's own is told."""

    def __init__(self):
        super().__init__()
        self.logs = []

    def on_train_batch_end(self, batch, logs=None):
        self.logs.append(dict(logs))


def _monitor(case, validated="val_"):
    return f"{validated}{'my_' if case.reports == 'renamed' else ''}loss"


CALLBACKS = {
    "none": lambda case: None,
    "nan": lambda case: keras.callbacks.TerminateOnNaN(),
    "stop": lambda case: keras.callbacks.EarlyStopping(
        _monitor(case, ""), mode="min", patience=2, restore_best_weights=True
    ),
    "stop_val": lambda case: keras.callbacks.EarlyStopping(
        _monitor(case), mode="min", patience=2, restore_best_weights=True
    ),
    "plateau": lambda case: keras.callbacks.ReduceLROnPlateau(
        _monitor(case, ""), mode="min", patience=2
    ),
    "schedule": lambda case: keras.callbacks.LearningRateScheduler(
        lambda epoch, rate: rate * 0.5
    ),
}
SOURCES = ("arrays", "batches")
BAD = ("none", "first", "middle", "last", "targets")
COUNTS = (3, 5)


def cases():
    """Returns every combination that Keras itself can run."""
    fields = [MODES, MODELS, REPORTS, METRICS, CALLBACKS, COUNTS, BAD, SOURCES]
    made = itertools.starmap(Case, itertools.product(*fields))
    return [each for each in made if _is_possible(each)]


def sample(count, seed=0):
    """Returns some of them, the same each time."""
    every = cases()
    return random.Random(seed).sample(every, min(count, len(every)))


def _is_possible(case):
    # Other keys than the metrics': Keras reports the last step's own numbers.
    if case.reports == "twice" and case.bad == "last":
        return False
    # Keras gives replicas' `train_on_batch` no batches of uneven data.
    return not (case.mode == "replicas" and case.source == "batches")


# --- both runs ---------------------------------------------------------------


def difference(case):
    """Says what tfmix reports otherwise than plain Keras; "" for nothing."""
    ours, theirs = _run(case, "mixed_bfloat16"), _oracle(case)
    for name, found in ours.items():
        expected = theirs[name]
        if not _alike(found, expected):
            return f"{name}: {found} instead of {expected}"
    return ""


def _oracle(case):
    mode = case.mode if case.mode == "replicas" else "xla"
    where = "targets" if case.bad == "middle" else case.bad
    return _in_plain_keras(dataclasses.replace(case, mode=mode, bad=where))


@functools.cache
def _in_plain_keras(case):
    return _run(case, None)


def _run(case, policy):
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    with tfmix.policy_scope(policy or "float32"), _strategy(case).scope():
        model = MODELS[case.model](REPORTS[case.reports])
        model.compile(
            keras.optimizers.SGD(0.02),
            "mse",
            metrics=METRICS[case.metric](),
            **MODES[case.mode],
        )
    arrays, bad = _data(case, planted=policy is not None)
    good = _data(case, planted=False)[0]
    if case.source == "batches":
        return _on_batches(case, model, arrays, bad)
    callback, seen = CALLBACKS[case.callback](case), Seen()
    history = model.fit(
        *arrays,
        epochs=3,
        batch_size=BATCH,
        shuffle=False,
        verbose=0,
        validation_data=good if case.callback == "stop_val" else None,
        callbacks=[seen, *([callback] if callback else [])],
    )
    told = [seen.logs[n :: _count(arrays)] for n in range(_count(arrays))]
    told = [logs for n, logs in enumerate(told) if n not in bad]
    return {
        "history": history.history,
        "epochs": {"count": [len(history.epoch)]},
        "stopped": {"best": [getattr(callback, "best_epoch", 0)]},
        **{f"batch {n}": _columns(logs) for n, logs in enumerate(told)},
    }


def _on_batches(case, model, arrays, bad):
    found = []
    for n in range(_count(arrays)):
        part = [a[BATCH * n : BATCH * (n + 1)] for a in arrays]
        logs = model.train_on_batch(*part, return_dict=True)
        if n not in bad:
            found.append(logs)
        elif not np.isnan(logs.get("my_loss", logs.get("loss"))):
            raise AssertionError(f"a skipped batch reports {logs}")
    return {"logs": _columns(found)}


def _strategy(case):
    if BACKEND == "tensorflow":
        import tensorflow as tf

        from tests import helpers

        if case.mode == "replicas":
            return helpers.mirrored_strategy()
        return tf.distribute.get_strategy()
    return _NoStrategy()


class _NoStrategy:
    def scope(self):
        return tfmix.policy_scope(tfmix.global_policy())


def _data(case, planted):
    """Returns inputs and targets, and which batches of them are not finite."""
    rng = np.random.default_rng(0)
    x = rng.integers(-4, 5, (BATCH * case.batches, 3)).astype("float32") / 4
    y = x.sum(axis=1, keepdims=True) + 1.0
    places = {"none": [], "first": [0], "last": [case.batches - 1]}
    bad = places.get(case.bad, [case.batches // 2])
    rows = [n for n in range(len(x)) if n // BATCH in bad]
    if planted:
        (y if case.bad == "targets" else x)[rows] = np.nan
        return (x, y), bad
    kept = [n for n in range(len(x)) if n not in rows]
    return (x[kept], y[kept]), []


def _count(arrays):
    return len(arrays[0]) // BATCH


def _columns(logs):
    keys = sorted({key for each in logs for key in each})
    return {key: [each.get(key, np.nan) for each in logs] for key in keys}


def _alike(found, expected):
    if set(found) != set(expected):
        return False
    # Two products in bfloat16, a few steps of training apart.
    return all(
        np.shape(found[key]) == np.shape(expected[key])
        and np.allclose(found[key], expected[key], rtol=0.1, atol=0.1)
        for key in found
    )
