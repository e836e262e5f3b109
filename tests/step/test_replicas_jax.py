"""Under JAX, one bad shard of eight makes all skip."""

import re

import keras
import numpy as np
import pytest

from tests import helpers
from tfmix._keras import replacing
from tfmix.loss_scaling import optimizer as optimizers
from tfmix.step import guard as guards

if keras.backend.backend() != "jax":
    pytest.skip("keras.distribution is JAX's here", allow_module_level=True)

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

VARIABLES = 3


@pytest.fixture
def eight_devices():
    # The optimizer scales the loss of a model that has no record.
    replacing.want(replacing.COMPILE, False)
    devices = keras.distribution.list_devices("cpu")
    assert len(devices) == 8
    keras.distribution.set_distribution(
        keras.distribution.DataParallel(devices=devices)
    )
    yield
    keras.distribution.set_distribution(None)


def data(bad_row=None):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 4)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    if bad_row is not None:
        x[bad_row] = np.nan
    return x, y


def trained(x, y, **inner):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(8, dtype="mixed_float16"),
            keras.layers.BatchNormalization(dtype="mixed_float16"),
            keras.layers.Dense(1),
        ]
    )
    wrapped = optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.05, **inner), initial_scale=1024.0
    )
    model.compile(wrapped, loss="mse", metrics=["mae"])
    guards.guard(model)
    history = model.fit(
        x, y, batch_size=16, epochs=2, shuffle=False, verbose=0
    ).history
    return model, history


@pytest.mark.costly
@pytest.mark.parametrize(
    "inner", [{}, {"global_clipnorm": 0.5}, {"gradient_accumulation_steps": 2}]
)
def test_one_bad_shard_makes_all_skip(eight_devices, inner):
    # Row 19 is in the second shard of the second batch.
    model, history = trained(*data(bad_row=19), **inner)
    assert model.optimizer.skipped_steps == 2
    assert model.optimizer.loss_scale == 256.0
    helpers.assert_all_finite(model.variables)
    helpers.assert_all_finite([history["loss"], history["mae"]])
    for variable in model.optimizer.variables + model.variables:
        first, *others = variable.value.addressable_shards
        for other in others:
            helpers.assert_same_bits(other.data, first.data)


def test_eight_devices_equal_one(eight_devices):
    parallel, _ = trained(*data(bad_row=19))
    keras.distribution.set_distribution(None)
    alone, _ = trained(*data(bad_row=19))
    pairs = zip(
        parallel.trainable_variables, alone.trainable_variables, strict=True
    )
    for left, right in pairs:
        np.testing.assert_allclose(
            helpers.to_numpy(left),
            helpers.to_numpy(right),
            **helpers.tolerance("float16"),
        )


def exchanges(scaled, sharded):
    """Returns the inputs of each all-reduce of a compiled train step."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    split = NamedSharding(mesh, PartitionSpec("data"))
    whole = NamedSharding(mesh, PartitionSpec())
    placed = split if sharded else whole
    variables = [
        keras.Variable(np.ones((16, 8), "float32")) for _ in range(VARIABLES)
    ]
    optimizer = keras.optimizers.SGD(0.1)
    if scaled:
        optimizer = optimizers.LossScaleOptimizer(optimizer)
        helpers.takes_scaled_gradients(optimizer)
    optimizer.build(variables)
    x = jax.device_put(np.ones((8, 16), "float32"), split)
    state = [jax.device_put(v.value, whole) for v in optimizer.variables]
    weights = [jax.device_put(v.value, placed) for v in variables]

    def loss(weights, x):
        return sum(jax.numpy.tanh(x @ weight).sum() for weight in weights)

    def step(weights, state, x):
        grads = [
            jax.lax.with_sharding_constraint(grad, placed)
            for grad in jax.grad(loss)(weights, x)
        ]
        return optimizer.stateless_apply(state, grads, weights)

    text = jax.jit(step).lower(weights, state, x).compile().as_text()
    return re.findall(r"= (.+?) all-reduce(?:-start)?\(", text)


def test_replicas_of_a_whole_model_exchange_nothing_for_the_scale():
    bare = exchanges(scaled=False, sharded=False)
    assert bare
    assert exchanges(scaled=True, sharded=False) == bare


def test_shards_join_their_booleans_in_one_message():
    bare = exchanges(scaled=False, sharded=True)
    ours = exchanges(scaled=True, sharded=True)
    (added,) = [each for each in ours if "pred" in each]
    assert len(ours) == len(bare) + 1
    counts = [int(n) for n in re.findall(r"pred\[(\d*)\]", added) if n]
    assert sum(counts) <= VARIABLES
