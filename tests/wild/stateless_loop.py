"""JAX's way: `stateless_call` and `stateless_apply` in a loop, jitted."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
from keras import layers


class Table(layers.Layer):
    def call(self, x):
        table = jnp.linspace(0.0, 1.0, x.shape[-1], dtype="float32")
        return jax.lax.mul(x, jnp.broadcast_to(table, x.shape))


def main(jit=False):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 8)).astype("float32")
    y = x.sum(1, keepdims=True)
    model = keras.Sequential(
        [keras.Input((8,)), layers.Dense(16, "relu"), Table(), layers.Dense(1)]
    )
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)

    def loss_of(trainable, frozen):
        out, frozen = model.stateless_call(trainable, frozen, x, training=True)
        return jnp.mean((out - y) ** 2), frozen

    def step(trainable, frozen, slots):
        grad = jax.value_and_grad(loss_of, has_aux=True)
        (loss, frozen), gradients = grad(trainable, frozen)
        trainable, slots = optimizer.stateless_apply(
            slots, gradients, trainable
        )
        return loss, (trainable, frozen, slots)

    step = jax.jit(step) if jit else step
    these = model.trainable_variables, model.non_trainable_variables
    state = [[v.value for v in vs] for vs in (*these, optimizer.variables)]
    losses = []
    for _ in range(8):
        loss, state = step(*state)
        losses.append(float(loss))
    return losses
