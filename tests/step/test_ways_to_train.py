"""A bad batch leaves no trace, whichever way a model is trained.

The reference is the same run without that batch: weights, statistics, the
optimizer's state and the epochs' metrics are equal.
"""

import itertools

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfmix
from tests import helpers, loops

if helpers.ON_JAX:
    import jax
else:
    import tensorflow as tf

ROWS, BATCHES, EPOCHS = 8, 6, 2
# The quick run tries the first of a costly test.
MODES = ("xla", "eager") if helpers.ON_JAX else ("eager", "graph", "xla")
POLICIES = ("mixed_float16", "mixed_bfloat16")
# A skipped step changes these counts, and those of a model that applies every
# second step.
COUNTS = (
    *("skipped_steps", "data_skips", "consecutive_skips"),
    *("overflow_counts", "count"),
)


def batches(bad=None, leave_out=()):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(BATCHES, ROWS, 4)).astype("float32")
    y = x.sum(axis=-1, keepdims=True)
    if bad is not None:
        x[bad, 1, 2] = np.nan
    kept = [n for n in range(BATCHES) if n not in leave_out]
    return x[kept], y[kept]


def network(outputs=1):
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((4,)),
            layers.BatchNormalization(),
            # A CPU's relu may return 0 for NaN.
            layers.Dense(8, "tanh"),
            layers.BatchNormalization(),
            layers.Dense(outputs, dtype="float32"),
        ]
    )


class Sums(layers.Layer):
    """Keeps a state that Keras does not list."""

    def __init__(self):
        super().__init__()
        self.total = tf.Variable(0.0, trainable=False)

    def call(self, x):
        self.total.assign_add(tf.reduce_sum(tf.cast(x, "float32")))
        return x


def with_states():
    keras.utils.set_random_seed(1)
    gru = layers.GRU(3, stateful=True)
    sums, last = Sums(), layers.Dense(1, dtype="float32")
    model = [keras.Input((4,), ROWS), layers.Reshape((2, 2)), gru, sums, last]
    return keras.Sequential(model)


def numbers(model):
    """Lists the variables of a model, and the states of `with_states`."""
    states = [s for one in model.layers for s in getattr(one, "states", [])]
    sums = [one.total for one in model.layers if hasattr(one, "total")]
    return [*model.variables, *states, *sums]


def adam(**settings):
    return keras.optimizers.Adam(0.01, **settings)


def how(mode):
    return {"run_eagerly": mode == "eager", "jit_compile": mode == "xla"}


class Fit:
    """Trains a model of `make` with `fit`."""

    def __init__(self, make, mode, epochs=EPOCHS):
        self.model = make(mode)
        self.epochs = epochs

    def run(self, x, y):
        flat = [each.reshape(-1, each.shape[-1]) for each in (x, y)]
        history = self.model.fit(
            *flat,
            batch_size=ROWS,
            epochs=self.epochs,
            shuffle=False,
            verbose=0,
        )
        return history.history

    def variables(self):
        held = [*vars(self.model).values()]
        kind = keras.optimizers.Optimizer
        optimizers = {id(o): o for o in held if isinstance(o, kind)}.values()
        of_them = [v for one in optimizers for v in one.variables]
        return [*numbers(self.model), *of_them]


class OnBatch(Fit):
    def run(self, x, y):
        logs = []
        for _ in range(EPOCHS):
            self.model.reset_metrics()
            for one in zip(x, y, strict=True):
                last = self.model.train_on_batch(*one, return_dict=True)
            logs.append(last)
        return {name: [log[name] for log in logs] for name in logs[0]}


def compiled(mode, optimizer=None, make=network, **settings):
    model = make()
    model.compile(
        optimizer or adam(),
        loss="mse",
        metrics=["mae"],
        **how(mode),
        **settings,
    )
    return model


def wrapped(mode):
    return compiled(mode, tfmix.LossScaleOptimizer(adam(use_ema=True)))


def guarded(rule):
    def make(mode):
        inner = tfmix.LossScaleOptimizer(adam(), loss_scale=rule)
        return tfmix.guard(compiled(mode, inner))

    return make


def accumulating(mode):
    return compiled(mode, adam(gradient_accumulation_steps=2))


class InBranch(keras.optimizers.Adam):
    """Applies in a branch of a conditional, as one that accumulates does."""

    def apply(self, grads, trainable_variables=None):
        if not self.built:
            self.build(trainable_variables)

        def branch():
            keras.optimizers.Adam.apply(self, grads, trainable_variables)
            return True

        tf.cond(self.iterations >= 0, branch, lambda: False)


def in_branch(mode):
    return compiled(mode, InBranch(0.01))


def three_steps(mode):
    return compiled(mode, steps_per_execution=1 if mode == "eager" else 3)


def mirrored(mode):
    with helpers.mirrored_strategy().scope():
        return compiled(mode)


class Own(keras.Model):
    """Has a `train_step` of the user's own, which subclasses define."""

    def __init__(self):
        super().__init__()
        self.network = network()
        self.seen = keras.metrics.Mean(name="seen")

    def call(self, x, training=False):
        return self.network(x, training=training)

    def loss_of(self, x, y):
        return ops.mean((self(x, training=True) - y) ** 2)

    def slopes(self, batch, weights=None, loss_of=None):
        weights = weights or self.trainable_variables
        with tf.GradientTape() as tape:
            loss = (loss_of or self.loss_of)(*batch)
        return tape.gradient(loss, weights), weights, loss

    def logs(self, loss):
        self.seen.update_state(loss)
        return {"seen": self.seen.result()}

    @classmethod
    def made(cls, mode):
        model = cls()
        model.build((None, 4))
        cls.compiled_as(model, mode)
        return model

    def compiled_as(self, mode):
        self.compile(adam(), **how(mode))


class OwnStep(Own):
    def train_step(self, batch):
        slopes, weights, loss = self.slopes(batch)
        self.optimizer.apply(slopes, weights)
        return self.logs(loss)


class ByLayers(Own):
    """Only adapts statistics, and calls layers outside of any model."""

    def train_step(self, batch):
        x, y = batch
        for layer in self.network.layers:
            x = layer(x, training=True)
        return self.logs(ops.mean((x - y) ** 2))


class Averaging(OwnStep):
    """Keeps an average of the weights, like Keras's DDIM example.

    The average is a network as well, whose weights count as trainable.
    """

    def __init__(self):
        super().__init__()
        self.average = network()

    def compiled_as(self, mode):
        Own.compiled_as(self, mode)
        self.optimizer.build(self.network.trainable_variables)

    def train_step(self, batch):
        weights = self.network.trainable_variables
        slopes, _, loss = self.slopes(batch, weights)
        self.optimizer.apply(slopes, weights)
        averages = self.average.trainable_variables
        for average, weight in zip(averages, weights, strict=True):
            average.assign(0.9 * average + 0.1 * weight)
        return self.logs(loss)


class OwnGiven(Own):
    """Steps the optimizer that it gave to `compile`, like Keras's guides."""

    def compiled_as(self, mode):
        self.actor_optimizer = adam()
        self.compile(self.actor_optimizer, **how(mode))

    def train_step(self, batch):
        slopes, weights, loss = self.slopes(batch)
        self.actor_optimizer.apply_gradients(zip(slopes, weights, strict=True))
        return self.logs(loss)


class Gan(Own):
    """Has two optimizers, which both see the batch."""

    def __init__(self):
        super().__init__()
        self.generator = network(4)

    def compiled_as(self, mode):
        self.compile(**how(mode))
        self.d_optimizer, self.g_optimizer = adam(), adam()

    def made_of(self, x):
        return self.generator(x, training=True)

    def train_step(self, batch):
        x, y = batch
        weights = self.network.trainable_variables
        slopes, _, loss = self.slopes((x - self.made_of(x), y), weights)
        self.d_optimizer.apply(slopes, weights)
        weights = self.generator.trainable_variables

        def fooled(x, y):
            return ops.mean(self(x + self.made_of(x), training=True) ** 2)

        slopes, _, _ = self.slopes((x, y), weights, fooled)
        self.g_optimizer.apply(slopes, weights)
        return self.logs(loss)


class ByHand(Own):
    """Accumulates gradients, and applies them after every second batch."""

    def __init__(self):
        super().__init__()
        self.sums = [
            self.add_weight(shape=v.shape, initializer="zeros", trainable=False)
            for v in self.network.trainable_variables
        ]
        self.count = self.add_weight(
            shape=(), dtype="int32", trainable=False, name="count"
        )

    def apply_sums(self, optimizer):
        weights = self.trainable_variables
        optimizer.apply([v / 2 for v in self.sums], weights)
        for total in self.sums:
            total.assign(ops.zeros_like(total))

    def train_step(self, batch):
        slopes, _, loss = self.slopes(batch)
        for total, slope in zip(self.sums, slopes, strict=True):
            total.assign(total + slope)
        self.count.assign(self.count + 1)
        tf.cond(
            tf.equal(self.count % 2, 0),
            lambda: self.apply_sums(self.optimizer),
            lambda: None,
        )
        return self.logs(loss)


class Loop:
    """A user's own loop, for a model that is compiled or not."""

    def __init__(
        self, mode, is_compiled, is_models=False, make=network, optimizer=None
    ):
        self.model = make()
        self.optimizer = optimizer or adam()
        if is_compiled:
            self.model.compile(self.optimizer if is_models else "sgd", "mse")
        if is_models:
            self.optimizer = self.model.optimizer
        self.step = loops.Loop(self.model, self.optimizer, mode).step

    def run(self, x, y):
        for _ in range(EPOCHS):
            for one in zip(x, y, strict=True):
                self.step(*map(ops.convert_to_tensor, one))
        return {}

    def variables(self):
        return [*numbers(self.model), *self.optimizer.variables]


class OwnStepOnJax(Own):
    def compute(self, state, x, y):
        weights, others, slots, metrics = state

        def loss_of(weights):
            found, after = self.stateless_call(
                weights, others, x, training=True
            )
            return ops.mean((found - y) ** 2), after

        (loss, others), slopes = jax.value_and_grad(loss_of, has_aux=True)(
            weights
        )
        ids = [id(v) for v in self.metrics_variables]
        at = ids.index(id(self.seen.variables[0]))
        seen = self.seen.stateless_update_state(metrics[at : at + 2], loss)
        metrics = [*metrics[:at], *seen, *metrics[at + 2 :]]
        logs = {"seen": self.seen.stateless_result(seen)}
        return slopes, logs, (weights, others, slots, metrics)

    def train_step(self, state, data):
        slopes, logs, state = self.compute(state, *data)
        weights, others, slots, metrics = state
        weights, slots = self.applied(slots, slopes, weights, others)
        return logs, (weights, others, slots, metrics)

    def applied(self, slots, slopes, weights, others):
        return self.optimizer.stateless_apply(slots, slopes, weights)


class ByHandOnJax(OwnStepOnJax):
    """Accumulates gradients, and applies them after every second batch."""

    def __init__(self):
        super().__init__()
        self.count = self.add_weight(
            shape=(), dtype="int32", trainable=False, name="count"
        )
        self.sums = [
            self.add_weight(shape=v.shape, initializer="zeros", trainable=False)
            for v in self.network.trainable_variables
        ]

    def applied(self, slots, slopes, weights, others):
        ids = [id(v) for v in self.non_trainable_variables]
        places = [ids.index(id(total)) for total in self.sums]
        sums = [others[n] + g for n, g in zip(places, slopes, strict=True)]
        at = ids.index(id(self.count))
        others[at] = others[at] + 1

        def apply(slots, sums, weights):
            halves = [total / 2 for total in sums]
            new = self.optimizer.stateless_apply(slots, halves, weights)
            return *new, [ops.zeros_like(total) for total in sums]

        weights, slots, sums = jax.lax.cond(
            others[at] % 2 == 0,
            apply,
            lambda slots, sums, weights: (weights, slots, sums),
            *(slots, sums, weights),
        )
        for n, total in zip(places, sums, strict=True):
            others[n] = total
        return weights, slots


def fit(make, kind=Fit, **settings):
    return lambda mode: kind(make, mode, **settings)


def accumulating_loop(mode):
    return Loop(mode, True, optimizer=adam(gradient_accumulation_steps=2))


def loop(*args, **settings):
    return lambda mode: Loop(mode, *args, **settings)


WAYS = {
    "fit": fit(compiled),
    "fit of a wrapped optimizer": fit(wrapped),
    "fit with accumulation": fit(accumulating),
    "fit, three steps an execution": fit(three_steps),
    "train_on_batch": fit(compiled, OnBatch),
    "loop": loop(False),
    "loop, compiled": loop(True),
    "loop, compiled, the model's optimizer": loop(True, True),
    "loop with accumulation": accumulating_loop,
}
if helpers.ON_JAX:
    own_steps = [OwnStepOnJax]
    in_turns = [ByHandOnJax]
else:
    own_steps = [OwnStep, OwnGiven, ByLayers, Gan, Averaging]
    in_turns = [ByHand]
    WAYS["fit of two replicas"] = fit(mirrored)
    WAYS["fit, applied in a branch"] = fit(in_branch)
    WAYS["fit with states"] = fit(lambda mode: compiled(mode, make=with_states))
    WAYS["loop with states"] = loop(False, make=with_states)
GUARDED = {
    "guarded fit, a fixed scale": fit(guarded(64.0)),
    "guarded fit, no scale": fit(guarded(tfmix.NoLossScale())),
}
WAYS |= {kind.__name__: fit(kind.made) for kind in own_steps}
# Several steps per execution, and replicas, cannot run eagerly.
NEVER = {
    *(("fit of two replicas", mode) for mode in ("eager", "xla")),
    ("fit, three steps an execution", "eager"),
}


def state(way):
    found = {}
    for n, variable in enumerate(way.variables()):
        path = getattr(variable, "path", variable.name)
        name = path.split("/")[-1]
        if name not in COUNTS and "seed" not in name:
            found[f"{n} {path}"] = helpers.to_numpy(variable)
    return found


def assert_same(make, bad, leave_out, policy):
    tfmix.set_global_policy(policy)
    found, skipped = [], []
    for data in (batches(bad=bad), batches(leave_out=leave_out)):
        way = make()
        found.append({**way.run(*data), **state(way)})
        optimizer = getattr(way.model, "optimizer", None)
        skipped.append(getattr(optimizer, "skipped_steps", None))
    ours, expected = found
    for (key, one), other in zip(ours.items(), expected.values(), strict=True):
        np.testing.assert_allclose(one, other, 1e-5, 1e-5, err_msg=key)
    assert all(np.isfinite(one).all() for one in ours.values())
    return skipped


QUICK = {
    ("fit", "graph"),
    ("loop, compiled", "xla" if helpers.ON_JAX else "graph"),
    ("loop with states", "graph"),
    ("OwnStep", "graph"),
    ("OwnStepOnJax", "xla"),
}
CASES = [
    *itertools.product(WAYS, MODES, POLICIES),
    *itertools.product(GUARDED, MODES, ["float32"]),
]
CASES = [case for case in CASES if case[:2] not in NEVER]


@pytest.mark.parametrize(
    ("name", "mode", "policy"),
    helpers.quick_are({case for case in CASES if case[:2] in QUICK}, CASES),
)
def test_a_bad_batch_is_as_if_it_had_not_been_there(name, mode, policy):
    make = (WAYS | GUARDED)[name]
    skipped = assert_same(lambda: make(mode), 3, [3], policy)
    if "fit" in name or name == "train_on_batch":
        # An optimizer that is not wrapped counts elsewhere.
        assert skipped in ([EPOCHS, 0], [None, None])


@pytest.mark.costly
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", in_turns)
def test_a_bad_batch_whose_gradients_are_to_be_applied(kind, mode, policy):
    # The next epoch would apply the gradients of the other batches.
    make = fit(kind.made, epochs=1)
    assert_same(lambda: make(mode), 3, [3], policy)


@pytest.mark.costly
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", in_turns)
def test_a_bad_batch_is_lost_with_those_that_it_was_added_to(
    kind, mode, policy
):
    assert_same(lambda: fit(kind.made)(mode), 2, [2, 3], policy)


def unbuilt():
    keras.utils.set_random_seed(1)
    return keras.Sequential([layers.BatchNormalization(), layers.Dense(1)])


@pytest.mark.costly
@pytest.mark.parametrize("mode", MODES)
def test_a_bad_batch_may_be_the_first_which_builds_the_model(mode):
    make = fit(lambda mode: compiled(mode, make=unbuilt), epochs=1)
    assert_same(lambda: make(mode), 0, [0], "mixed_float16")


class Smallest(layers.Layer):
    """Keeps the smallest number seen, infinite at first."""

    def build(self, shape):
        self.smallest = self.add_weight(
            shape=(), initializer=keras.initializers.Constant(np.inf)
        )
        self.smallest.trainable = False

    def call(self, x):
        seen = ops.cast(ops.min(x), "float32")
        self.smallest.assign(ops.minimum(self.smallest, seen))
        return x


@helpers.requires_backend("tensorflow")
def test_an_infinite_initial_value_is_not_a_bad_batch():
    tfmix.set_global_policy("mixed_float16")
    model = [keras.Input((4,)), Smallest(), layers.Dense(1)]
    way = Loop("graph", False, make=lambda: keras.Sequential(model))
    x, y = map(tf.constant, next(zip(*batches(), strict=True)))
    way.step(x, y)
    smallest = np.float16(x.numpy().min())
    assert helpers.to_numpy(way.model.layers[0].smallest) == smallest
