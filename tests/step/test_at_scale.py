"""Exchanges of replicas for the loss scale match docs/how-it-works.md."""

import re

import keras
import numpy as np

import tfmix
from tests import helpers

pytestmark = helpers.requires_backend("jax")
ROWS, COLUMNS, VARIABLES = 16, 8, 3


def exchanges(scaled, sharded):
    """Returns the inputs of each all-reduce of a compiled train step."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    split = NamedSharding(mesh, PartitionSpec("data"))
    whole = NamedSharding(mesh, PartitionSpec())
    placed = split if sharded else whole
    variables = [
        keras.Variable(np.ones((ROWS, COLUMNS), "float32"))
        for _ in range(VARIABLES)
    ]
    optimizer = keras.optimizers.SGD(0.1)
    if scaled:
        optimizer = tfmix.LossScaleOptimizer(optimizer)
        helpers.takes_scaled_gradients(optimizer)
    optimizer.build(variables)
    x = jax.device_put(np.ones((8, ROWS), "float32"), split)
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
