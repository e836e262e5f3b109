"""8-bit state of sharded variables trains alike, and is not fetched (JAX)."""

import functools
import math

import keras
import numpy as np
import pytest

import tfmix
from tests import helpers
from tfmix.hardware import compiled_text
from tfmix.optimizers import eight_bit

if keras.backend.backend() != "jax":
    pytest.skip("keras.distribution is JAX's here", allow_module_level=True)

RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 64)).astype("float32")
Y = np.tanh(X @ RNG.normal(size=(64, 64))).astype("float32")
MASTERS = tfmix.optimizers.MasterWeightOptimizer
WAYS = {
    "low memory": (tfmix.optimizers.LowMemoryOptimizer, "float32"),
    "masters": (functools.partial(MASTERS, slot_dtype="int8"), "bfloat16"),
    "split": (
        functools.partial(MASTERS, slot_dtype="int8", split=True),
        "bfloat16",
    ),
    "stochastic": (
        functools.partial(
            tfmix.optimizers.BFloat16Optimizer, slot_dtype="int8"
        ),
        "bfloat16",
    ),
}


@pytest.fixture
def sharded():
    """Shards columns of kernels over four devices, and data over two."""
    mesh = keras.distribution.DeviceMesh(
        (2, 4), ("batch", "model"), keras.distribution.list_devices("cpu")
    )
    layouts = keras.distribution.LayoutMap(mesh)
    # The pattern also matches the paths of optimizer state.
    layouts[".*kernel.*"] = (None, "model")
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(
            layout_map=layouts, batch_dim_name="batch"
        )
    )
    yield
    keras.distribution.set_distribution(None)


def model_of(way, policy=None):
    wrap, own = WAYS[way]
    keras.utils.set_random_seed(1)
    with tfmix.policy_scope(policy or own):
        layers = [keras.layers.Dense(128, "relu"), keras.layers.Dense(64)]
        model = keras.Sequential([keras.Input((64,)), *layers])
        model.compile(wrap(keras.optimizers.Adam(1e-3), seed=3), "mse")
    return model


def fit(model, epochs=4):
    history = model.fit(
        X, Y, epochs=epochs, batch_size=32, verbose=0, shuffle=False
    )
    return history.history["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("way", helpers.quick_are({"masters"}, WAYS))
def test_a_sharded_model_trains_as_on_one_device(sharded, way):
    model = model_of(way)
    losses = fit(model)
    kernel = model.layers[0].kernel.value.sharding
    slots = [v for v in model.optimizer.variables if "int8" in v.dtype]
    assert len(slots) == 4
    assert all(slot.value.sharding == kernel for slot in slots)
    keras.distribution.set_distribution(None)
    np.testing.assert_allclose(losses, fit(model_of(way)), rtol=5e-3)


def test_a_skipped_step_changes_no_byte_on_any_device(sharded):
    model = model_of("low memory", "mixed_float16")
    fit(model, 1)
    inner = model.optimizer.inner_optimizer
    kept = [*model.trainable_variables, *inner.variables]
    before = helpers.snapshot(kept)
    bad = np.where(np.arange(64)[:, None] == 5, np.inf, X)
    # Keras 3.12 has no `train_on_batch` for several devices.
    model.fit(bad, Y, batch_size=64, verbose=0)
    helpers.assert_unchanged(kept, before)
    assert model.optimizer.skipped_steps == 1


@pytest.mark.costly
@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((512, 1024), (None, "model")),
        ((512, 1000), ("model", None)),
        ((500, 1024), (None, "model")),
        # An attention's query kernel has the axes width, heads and head size.
        ((500, 16, 64), (None, "model", None)),
    ],
)
def test_no_device_fetches_the_state_of_others(shape, spec):
    import jax

    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:4]), ("model",))
    variable = keras.Variable(np.zeros(shape, "float32"))
    optimizer = tfmix.optimizers.LowMemoryOptimizer(
        keras.optimizers.Adam(), seed=3
    )
    optimizer.build([variable])

    def described(one):
        parts = spec if tuple(one.shape) == shape else ()
        placed = jax.sharding.PartitionSpec(*parts)
        sharding = jax.sharding.NamedSharding(mesh, placed)
        return jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=sharding)

    weights, slots = (
        [described(variable)],
        [*map(described, optimizer.variables)],
    )

    def step(trained, held, gradients):
        return optimizer.stateless_apply(held, gradients, trained)

    results = jax.tree.map(lambda one: one.sharding, (weights, slots))
    stepped = jax.jit(step, donate_argnums=(0, 1), out_shardings=results)
    text = stepped.lower(weights, slots, weights).compile().as_text()
    # All devices keep the block sizes of both moments.
    numbers = math.prod(eight_bit.blocks_shape(shape))
    assert compiled_text.read(text).exchanged <= 2 * 4 * numbers
