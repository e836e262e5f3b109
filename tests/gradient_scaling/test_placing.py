"""Gradients that grow inside a model find their place in every way to train."""

import functools

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfmix
from tests import helpers, steps
from tfmix.gradient_scaling import placing

if helpers.ON_JAX:
    import jax
else:
    import tensorflow as tf

STEPS, ROWS, TIMES = 40, 8, 10
WAYS = (
    ("fit", "jax.grad", "jax.grad under jax.jit")
    if helpers.ON_JAX
    else ("fit", "tape", "tape in a graph", "tape under XLA")
)
# An optimizer without a wrapper has no state for the place in a step that JAX
# compiles, and `compile` wraps it.
BARE = ("jax.grad",) if helpers.ON_JAX else WAYS[1:]
CASES = [*((way, True) for way in WAYS), *((way, False) for way in BARE)]


def recurrent():
    """Grows gradients by 2**20 on their way back through time."""
    grows = keras.initializers.Identity(4.0)
    cell = layers.SimpleRNN(
        4, None, False, recurrent_initializer=grows, trainable=False
    )
    return [layers.Dense(4, use_bias=False), cell]


def data():
    rng = np.random.default_rng(0)
    # Only the last time counts forward, whereas gradients reach all.
    x = np.zeros((STEPS, ROWS, TIMES, 2), "float32")
    x[:, :, -1] = rng.normal(size=(STEPS, ROWS, 2))
    y = x[:, :, -1].sum(-1, keepdims=True)
    return x, y


def recurrent_model():
    keras.utils.set_random_seed(1)
    last = layers.Dense(1, dtype="float32")
    return keras.Sequential([keras.Input((TIMES, 2)), *recurrent(), last])


def trained(way, wraps):
    """Trains; returns the loss of good data, and the skipped steps."""
    model, (x, y) = recurrent_model(), data()
    optimizer = keras.optimizers.Adam(0.02, clipnorm=1.0)
    if wraps:
        optimizer = tfmix.LossScaleOptimizer(optimizer)
    if way == "fit":
        model.compile(optimizer, "mse")
        flat = (each.reshape(-1, *each.shape[2:]) for each in (x, y))
        model.fit(*flat, batch_size=ROWS, shuffle=False, verbose=0)
    else:
        (jax_loop if helpers.ON_JAX else tape_loop)(model, optimizer, way, x, y)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    x, y = (each[-1] for each in data())
    loss = np.mean((model.predict(x, verbose=0) - y) ** 2)
    return loss, STEPS - int(ops.convert_to_numpy(inner.iterations))


def taped_step(model, optimizer, x, y):
    with tf.GradientTape() as tape:
        loss = ops.mean(ops.square(model(x, training=True) - y))
    weights = model.trainable_variables
    gradients = tape.gradient(loss, weights)
    optimizer.apply_gradients(zip(gradients, weights, strict=True))


def tape_loop(model, optimizer, way, x, y):
    step = functools.partial(taped_step, model, optimizer)
    if way != "tape":
        step = tf.function(step, jit_compile="XLA" in way)
    for pair in zip(x, y, strict=True):
        step(*map(tf.constant, pair))


def jax_loop(model, optimizer, way, x, y):
    optimizer.build(model.trainable_variables)

    def loss(weights, others, x, y):
        found, _ = model.stateless_call(weights, others, x, training=True)
        return ops.mean(ops.square(found - y))

    def step(weights, others, slots, x, y):
        with keras.StatelessScope(zip(optimizer.variables, slots, strict=True)):
            gradients = jax.grad(loss)(weights, others, x, y)
        return optimizer.stateless_apply(slots, gradients, weights)

    step = jax.jit(step)
    for pair in zip(x, y, strict=True):
        weights, others, slots = (
            [variable.value for variable in group]
            for group in (
                model.trainable_variables,
                model.non_trainable_variables,
                optimizer.variables,
            )
        )
        if way == "jax.grad":
            gradients = jax.grad(loss)(weights, others, *pair)
            optimizer.apply(gradients, model.trainable_variables)
            continue
        weights, slots = step(weights, others, slots, *pair)
        variables = [*model.trainable_variables, *optimizer.variables]
        for variable, value in zip(variables, [*weights, *slots], strict=True):
            variable.assign(value)


@pytest.mark.costly
@pytest.mark.parametrize(("way", "wraps"), CASES)
def test_gradients_that_grow_train_as_in_float32(way, wraps):
    tfmix.set_global_policy("float32")
    exact, _ = trained(WAYS[-1], False)
    tfmix.set_global_policy("mixed_float16")
    loss, skipped = trained(way, wraps)
    assert 0 < skipped < 12
    assert abs(loss - exact) < 0.1 * exact + 0.02


class OwnLoss(keras.Model):
    """Returns how far it changes each image: a mean over many pixels."""

    def __init__(self, of_pixels):
        super().__init__()
        near = keras.initializers.Constant(np.diag([0.997] * 3)[None, None])
        self.conv = layers.Conv2D(3, 1, use_bias=False, kernel_initializer=near)
        self.of_pixels = of_pixels

    def call(self, x):
        return self.of_pixels(ops.square(self.conv(x) - x))


@pytest.mark.costly
@pytest.mark.parametrize(
    "of_pixels",
    [lambda x: ops.mean(x, (1, 2, 3)), ops.mean],
    ids=["each_image", "one_number"],
)
def test_a_model_that_returns_its_own_loss_trains(of_pixels):
    x = np.random.default_rng(0).random((8, 256, 256, 3), "float32")

    def losses(policy):
        tfmix.set_global_policy(policy)
        model = OwnLoss(of_pixels)
        model.compile(
            keras.optimizers.SGD(1.0), loss=lambda _, loss: ops.mean(loss)
        )
        kwargs = {"batch_size": 8, "epochs": 3, "verbose": 0}
        return model.fit(x, np.zeros(8), **kwargs).history["loss"]

    exact, found = losses("float32"), losses("mixed_float16")
    # Pixels are rounded.
    np.testing.assert_allclose(found, exact, rtol=0.25)
    assert found[-1] < 0.25 * found[0]


@helpers.requires_backend("tensorflow")
def test_clipping_of_ones_own_hides_no_overflow():
    # It makes NaN of all gradients, as a bad batch does.
    tfmix.set_global_policy("mixed_float16")
    model, (x, y) = recurrent_model(), data()
    optimizer = keras.optimizers.Adam(0.02)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(model(x, training=True) - y))
        weights = model.trainable_variables
        gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, weights), 1.0)
        optimizer.apply_gradients(zip(gradients, weights, strict=True))

    for pair in zip(x, y, strict=True):
        step(*map(tf.constant, pair))
    assert int(optimizer.iterations) >= STEPS - 20


class Asking:
    """Asks for places, as the state of an optimizer does."""

    def __init__(self):
        self.places = {}


@helpers.requires_backend("tensorflow")
@pytest.mark.parametrize("mode", steps.MODES)
def test_a_models_place_is_the_lowest_that_its_optimizers_ask_for(mode):
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    assert placing.of(model) == 1.0
    one, other = Asking(), Asking()

    # The step of each is traced once, before the other has asked.
    def tell(mover):
        weights = model.trainable_variables
        told = functools.partial(placing.tell, mover, weights)
        return steps.compiled(told, mode)

    tell_one, tell_other = tell(one), tell(other)
    for told, before, after, expected in (
        (tell_one, 4.0, 4.0, 4.0),
        (tell_one, 4.0, 0.5, 0.5),
        (tell_other, 1.0, 1.0, 0.5),
        (tell_other, 1.0, 0.25, 0.25),
        (tell_one, 0.5, 1.0, 0.25),
        (tell_other, 0.25, 2.0, 2.0),
        (tell_one, 1.0, 1.0, 1.0),
    ):
        told(*map(tf.constant, (before, after)))
        assert float(placing.of(model)) == expected


@pytest.mark.costly
@helpers.requires_backend("tensorflow")
@pytest.mark.parametrize("wraps", [True, False])
def test_replicas_move_a_place_together(wraps):
    tfmix.set_global_policy("mixed_float16")
    strategy = helpers.mirrored_strategy()
    with strategy.scope():
        model, optimizer = recurrent_model(), keras.optimizers.Adam(0.02)
        inner = optimizer
        if wraps:
            optimizer = tfmix.LossScaleOptimizer(optimizer)

    # The first step builds the optimizer.
    on_replica = functools.partial(taped_step, model, optimizer)

    @tf.function
    def step(x, y):
        strategy.run(on_replica, args=(x, y))

    for pair in zip(*data(), strict=True):
        step(*map(tf.constant, pair))
    assert STEPS - 12 <= int(inner.iterations.numpy()) < STEPS
