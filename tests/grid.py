"""A grid of metrics, callbacks and kinds of models.

Each case trains one small model twice: under a 16-bit policy with batches of
NaN in its data, and in plain Keras without them. Keras must report the same
numbers, and its callbacks must make the same decisions.
"""

import collections
import contextlib
import dataclasses
import functools
import pathlib
import random
import tempfile

import keras
import numpy as np
from keras import ops

import tfmix
from tests import helpers

BATCH = 4
BACKEND = keras.backend.backend()


@dataclasses.dataclass(frozen=True)
class Case:
    """One combination; its fields are keys of the tables below."""

    mode: str
    policy: str
    bad: str
    where: str
    model: str
    reports: str
    metric: str
    callback: str
    batches: int
    source: str

    def __str__(self):
        return "-".join(map(str, dataclasses.astuple(self)))


MODES = {
    "eager": {"run_eagerly": True},
    "xla": {"jit_compile": True},
}
if BACKEND == "tensorflow":
    MODES |= {"graph": {"jit_compile": False}, "replicas": {}}


# --- methods of a model that report numbers --------------------------------


register = keras.saving.register_keras_serializable("grid")


@register
class Twice(keras.Model):
    """Reports its own number, which a skipped step does not have."""

    def compute_metrics(self, *args, **kwargs):
        logs = super().compute_metrics(*args, **kwargs)
        return {**logs, "twice": 2.0 * logs["loss"]}


@register
class Nested(keras.Model):
    def get_metrics_result(self):
        return {"all": super().get_metrics_result()}


@register
class Renamed(keras.Model):
    def get_metrics_result(self):
        found = super().get_metrics_result()
        return {f"my_{name}": value for name, value in found.items()}


@register
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


@register
class AddsLogs(keras.Model):
    """Calls Keras's `train_step`, and returns more."""

    def train_step(self, *args):
        found = super().train_step(*args)
        if BACKEND == "tensorflow":
            return {**found, "answer": ops.convert_to_tensor(42.0)}
        logs, state = found
        return {**logs, "answer": ops.convert_to_tensor(42.0)}, state


@register
class OwnStep(keras.Model):
    """Writes the whole step itself, as Keras's guides do."""

    def train_step(self, *args):
        step = self._tensorflow if BACKEND == "tensorflow" else self._jax
        return step(*args)

    def _tensorflow(self, data):
        import tensorflow as tf

        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        self.metrics[0].update_state(loss)
        return {"loss": self.metrics[0].result(), "own": loss * 2.0}

    def _jax(self, state, data):
        import jax

        trainable, others, slots, metrics = state
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)

        def loss_of(trainable, others):
            found, others = self.stateless_call(
                trainable, others, x, training=True
            )
            return self.compute_loss(y=y, y_pred=found), others

        (loss, others), grads = jax.value_and_grad(loss_of, has_aux=True)(
            trainable, others
        )
        trainable, slots = self.optimizer.stateless_apply(
            slots, grads, trainable
        )
        mean = self.metrics[0]
        count = len(mean.variables)
        mine = mean.stateless_update_state(metrics[:count], loss)
        logs = {"loss": mean.stateless_result(mine), "own": loss * 2.0}
        return logs, (trainable, others, slots, [*mine, *metrics[count:]])


REPORTS = {
    "plain": keras.Model,
    "twice": Twice,
    "nested": Nested,
    "renamed": Renamed,
    "one_more": OneMore,
    "adds_logs": AddsLogs,
    "own_step": OwnStep,
}


@register
class Lowest(keras.metrics.Metric):
    """A metric that does not start at zero."""

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


# --- the kinds of models, and how they are created -------------------------


@register
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


def _of(container):
    """Returns a function that creates a model with a container of outputs."""

    def make(kind):
        inputs = keras.Input((3,))
        first, second = _layers()
        y = first(inputs)
        last = keras.layers.Dense(1, dtype="float32")
        return kind(inputs, container([("a", second(y)), ("b", last(y))]))

    return make


CONTAINERS = {
    "dict": dict,
    "ordered": collections.OrderedDict,
    "list": lambda pairs: [value for _, value in pairs],
    "tuple": lambda pairs: tuple(value for _, value in pairs),
}
MODELS = {
    "graph": _graph,
    "normalised": lambda k: _graph(k, keras.layers.BatchNormalization()),
    "joined": lambda k: _graph(k, JoinsInCall()),
    **{name: _of(container) for name, container in CONTAINERS.items()},
}


# --- ways to get a model, without a policy ---------------------------------


def _around(model):
    inputs = keras.Input((3,))
    return type(model)(inputs, model(inputs))


def _cloned(model):
    copy = keras.models.clone_model(model)
    copy.set_weights(model.get_weights())
    return copy


def _loaded(model):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "model.keras"
        model.save(path)
        return keras.saving.load_model(path)


def _frozen(model):
    model.layers[1].trainable = False
    return model


MADE = {
    "as_it_is": lambda model: model,
    "wrapped": _around,
    "cloned": _cloned,
    "loaded": _loaded,
    "frozen": _frozen,
}


def _frozen_in_a_file(model, arrays):
    """Trains a step, freezes a layer, saves and loads, with the optimizer."""
    model.fit(*arrays, batch_size=BATCH, shuffle=False, verbose=0)
    loaded = _loaded(_frozen(model))
    loaded.optimizer.learning_rate = 0.02
    return loaded


# --- callbacks that decide -------------------------------------------------


class Seen(keras.callbacks.Callback):
    """A custom callback that keeps its logs."""

    def __init__(self):
        super().__init__()
        self.logs = []

    def on_train_batch_end(self, batch, logs=None):
        self.logs.append(dict(logs))


def _monitored(name, *args, **kwargs):
    """Returns a function that creates a Keras callback on a loss."""

    def make(case, folder):
        mine = "my_" if case.reports == "renamed" else ""
        validated = "val_" if case.callback.endswith("_val") else ""
        given = [folder / each for each in args]
        return getattr(keras.callbacks, name)(
            *given, monitor=f"{validated}{mine}loss", mode="min", **kwargs
        )

    return make


_STOP = _monitored("EarlyStopping", patience=2, restore_best_weights=True)
_PLATEAU = _monitored("ReduceLROnPlateau", patience=1, min_delta=10.0)
_BEST = _monitored(
    "ModelCheckpoint",
    "best.weights.h5",
    save_best_only=True,
    save_weights_only=True,
)
CALLBACKS = {
    "none": lambda case, folder: None,
    "nan": lambda case, folder: keras.callbacks.TerminateOnNaN(),
    "stop": _STOP,
    "stop_val": _STOP,
    "plateau": _PLATEAU,
    "plateau_val": _PLATEAU,
    "best": _BEST,
    "best_val": _BEST,
    "schedule": lambda case, folder: keras.callbacks.LearningRateScheduler(
        lambda epoch, rate: rate * 0.5
    ),
    "backup": lambda case, folder: keras.callbacks.BackupAndRestore(
        folder / "backup"
    ),
    "csv": lambda case, folder: keras.callbacks.CSVLogger(folder / "log.csv"),
    "swap": lambda case, folder: keras.callbacks.SwapEMAWeights(
        swap_on_epoch=True
    ),
}
# The sources are arrays for `fit`, batches for `train_on_batch`, and a
# generator for `fit`, whose epochs have one batch each.
SOURCES = ("arrays", "batches", "epochs")
BAD = ("nan", "inf", "targets")
WHERE = ("none", "first", "middle", "last")
POLICIES = ("mixed_bfloat16", "mixed_float16")
COUNTS = (3, 5)
# "thawed" is not in the tables: the model is frozen between save and load.
_KINDS = [f"{model}+{made}" for model in MODELS for made in [*MADE, "thawed"]]


def sample(count, seed=0, alike=6):
    """Returns some combinations, the same each time.

    Neighbouring combinations share an oracle.
    """
    drawn, found = random.Random(seed), []
    shared = [WHERE, _KINDS, REPORTS, METRICS, CALLBACKS, COUNTS, SOURCES]
    # Two replicas take four times as long.
    modes = [each for each in MODES if each != "replicas"] * 4 + ["replicas"]
    modes = [each for each in modes if each in MODES]
    while len(found) < count:
        rest = [drawn.choice(list(each)) for each in shared]
        for _ in range(alike):
            ours = [drawn.choice(each) for each in (modes, POLICIES, BAD)]
            case = Case(*ours, *rest)
            if _is_possible(case) and case not in found:
                found.append(case)
    return found[:count]


def _is_possible(case):
    """Returns whether Keras itself can run a combination."""
    model, made = case.model.split("+")
    # For keys that are not metrics, Keras reports the last step's numbers.
    if case.reports in ("twice", "own_step") and case.where == "last":
        return False
    if case.source == "epochs" and not (
        case.callback in ("none", "best", "csv")
        # Under TensorFlow, Keras cannot read lists from a generator.
        and model != "list"
        and case.where != "none"
        and case.reports not in ("twice", "own_step")
    ):
        return False
    # A skipped first step has no loss, at which `TerminateOnNaN` stops.
    if case.callback == "nan" and (
        case.source == "epochs" or case.where == "first"
    ):
        return False
    # Keras keeps NaN in the first epoch as the best value.
    if (case.source, case.where) == ("epochs", "first") and (
        case.callback == "best"
    ):
        return False
    if case.source == "batches" and case.callback != "none":
        return False
    if model in CONTAINERS and case.metric != "none":
        return False
    if case.reports in ("own_step", "one_more") and model in CONTAINERS:
        return False
    # This step does not update the metrics of `compile`.
    if case.reports == "own_step" and case.metric != "none":
        return False
    # Keras cannot load a custom model inside another custom model.
    if made == "wrapped" and model in CONTAINERS:
        return False
    # With replicas, Keras's `train_on_batch` does not split uneven data, and
    # Keras cannot read logs of nested values from a `train_step`.
    return not (
        case.mode == "replicas"
        and (case.source != "arrays" or case.reports == "own_step")
    )


# --- both runs ---------------------------------------------------------------


def difference(case):
    """Describes how tfmix's reports differ from plain Keras; "" if equal."""
    ours, theirs = _run(case, case.policy), _oracle(case)
    for name, found in ours.items():
        expected = theirs[name]
        if not _alike(found, expected):
            return f"{name}: {found} instead of {expected}"
    return ""


def _oracle(case):
    # Keras sums custom metrics over replicas, and each replica normalises with
    # its own rows.
    as_replicas = "normalised" in case.model or case.metric == "lowest"
    is_replicas = case.mode == "replicas" and as_replicas
    mode = "replicas" if is_replicas else "eager"
    return _in_plain_keras(
        dataclasses.replace(case, mode=mode, policy="", bad="")
    )


@functools.lru_cache(64)
def _in_plain_keras(case):
    return _run(case, None)


def _run(case, policy):
    with tempfile.TemporaryDirectory() as folder:
        return _run_in(case, policy, pathlib.Path(folder))


def _run_in(case, policy, folder):
    keras.utils.clear_session(free_memory=False)
    tfmix.set_global_policy("float32")
    keras.utils.set_random_seed(1)
    arrays, bad = _data(case, planted=policy is not None)
    good = _data(case, planted=False)[0]
    model = _model(case, policy, good)
    if case.source == "batches":
        return _on_batches(case, model, arrays, bad)
    callback, seen = CALLBACKS[case.callback](case, folder), Seen()
    known = {"batch_size": BATCH, "epochs": 3}
    if case.source == "epochs":
        known = {"steps_per_epoch": 1, "epochs": _count(arrays)}
        arrays = (_batches(case, arrays),)
    history = model.fit(
        *arrays,
        **known,
        shuffle=False,
        verbose=0,
        validation_data=good if case.callback.endswith("_val") else None,
        callbacks=[seen, *([callback] if callback else [])],
    )
    reported = history.history
    weights = {str(n): w for n, w in enumerate(model.get_weights())}
    result = {"weights": weights, "best": _decided(callback)}
    if case.source == "epochs":
        assert all(np.isnan(reported[_loss(reported)][n]) for n in bad), (
            f"an epoch of nothing reports {reported}"
        )
        kept = [n for n in range(known["epochs"]) if n not in bad]
        applied = {k: [v[n] for n in kept] for k, v in reported.items()}
        return result | {"history": applied}
    count = _count(arrays) if policy is None else case.batches
    logs = [seen.logs[n::count] for n in range(count)]
    logs = [each for n, each in enumerate(logs) if n not in bad]
    return result | {
        "history": reported,
        "epochs": {"count": [len(history.epoch)]},
        **{f"batch {n}": _columns(each) for n, each in enumerate(logs)},
    }


def _model(case, policy, arrays):
    """Creates a model under a policy, and compiles it without one."""
    name, made = case.model.split("+")
    with _scope(case):
        with tfmix.policy_scope(policy or "float32"):
            model = MODELS[name](REPORTS[case.reports])
        model = MADE.get(made, lambda model: model)(model)
        metrics, averaged = METRICS[case.metric](), case.callback == "swap"
        model.compile(
            keras.optimizers.SGD(0.02, use_ema=averaged, ema_momentum=0.5),
            "mse",
            metrics=metrics,
            **MODES[case.mode],
        )
        if made == "thawed":
            model = _frozen_in_a_file(model, arrays)
    return model


def _decided(callback):
    names = ("best_epoch", "best", "wait", "stopped_epoch")
    found = {each: getattr(callback, each, None) for each in names}
    return {k: [v] for k, v in found.items() if isinstance(v, int | float)}


def _loss(logs):
    return next(key for key in logs if key.endswith("loss"))


def _batches(case, arrays):
    x, y = arrays
    for n in range(_count(arrays)):
        part = slice(BATCH * n, BATCH * (n + 1))
        yield x[part], keras.tree.map_structure(lambda a, p=part: a[p], y)


def _on_batches(case, model, arrays, bad):
    found = []
    for n, part in enumerate(_batches(case, arrays)):
        logs = model.train_on_batch(*part, return_dict=True)
        if n not in bad:
            found.append(keras.tree.map_structure(float, logs))
        elif not np.isnan(_flat(logs)[_loss(_flat(logs))]):
            raise AssertionError(f"a skipped batch reports {logs}")
    return {"logs": _columns(found)}


def _flat(logs):
    return logs.get("all", logs)


def _scope(case):
    if case.mode == "replicas":
        return helpers.mirrored_strategy().scope()
    return contextlib.nullcontext()


def _data(case, planted):
    """Returns inputs and targets, and the numbers of bad batches."""
    rng = np.random.default_rng(0)
    x = rng.integers(-4, 5, (BATCH * case.batches, 3)).astype("float32") / 4
    y = x.sum(axis=1, keepdims=True) + 1.0
    places = {"none": [], "first": [0], "last": [case.batches - 1]}
    bad = places.get(case.where, [case.batches // 2])
    rows = [n for n in range(len(x)) if n // BATCH in bad]
    if planted:
        value = np.inf if case.bad == "inf" else np.nan
        (y if case.bad == "targets" else x)[rows] = value
    else:
        kept = [n for n in range(len(x)) if n not in rows]
        x, y, bad = x[kept], y[kept], []
    container = CONTAINERS.get(case.model.split("+")[0])
    if container is not None:
        return (x, container([("a", y), ("b", y)])), bad
    return (x, y), bad


def _count(arrays):
    return len(arrays[0]) // BATCH


def _columns(logs):
    keys = sorted({key for each in logs for key in each})
    return {key: [each.get(key, np.nan) for each in logs] for key in keys}


def _alike(found, expected):
    if set(found) != set(expected):
        return False
    # The models have two bfloat16 products, and train for a few steps.
    return all(
        np.shape(found[key]) == np.shape(expected[key])
        and np.allclose(found[key], expected[key], rtol=0.1, atol=0.1)
        for key in found
    )
