"""8-bit state of sharded variables trains alike, and is not fetched (JAX)."""

import math
import re

import keras
import numpy as np
import pytest

import tfmix
from tests import helpers
from tests.optimizers import sixteen_bit
from tfmix.optimizers import eight_bit
from tfmix.tools.hardware import hlo_text

if keras.backend.backend() != "jax":
    pytest.skip("keras.distribution is JAX's here", allow_module_level=True)

MASTERS = tfmix.optimizers.MasterWeightOptimizer
LOW = tfmix.optimizers.LowMemoryOptimizer
STOCHASTIC = tfmix.optimizers.BFloat16Optimizer
WAYS = {
    "low memory": (lambda low: low, "float32"),
    "masters": (MASTERS, "bfloat16"),
    "stochastic": (lambda low: STOCHASTIC(low, seed=3), "bfloat16"),
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
    optimizer = wrap(LOW(keras.optimizers.Adam(1e-3), seed=3))
    return sixteen_bit.model_of(optimizer, policy or own)


@pytest.mark.slow
@pytest.mark.parametrize("way", helpers.quick_are({"masters"}, WAYS))
def test_a_sharded_model_trains_as_on_one_device(sharded, way):
    model = model_of(way)
    losses = sixteen_bit.fit(model)
    kernel = model.layers[0].kernel.value.sharding
    slots = sixteen_bit.coded(model.optimizer)
    assert len(slots) == 4
    assert all(slot.value.sharding == kernel for slot in slots)
    keras.distribution.set_distribution(None)
    np.testing.assert_allclose(
        losses, sixteen_bit.fit(model_of(way)), rtol=5e-3
    )


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
    # A `reduce-window` is a CPU's own way to reduce, and exchanges nothing.
    exchanges = r"= (.+?) (?:all-\w+|collective-\w+|reduce-scatter)\("
    exchanged = re.findall(exchanges, text)
    assert exchanged
    assert sum(map(hlo_text.size, exchanged)) <= 2 * 4 * numbers
