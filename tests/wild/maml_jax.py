"""MAML on sine waves in JAX: `grad` in a `vmap` in a `grad`."""

import jax
import jax.numpy as jnp
import keras
import numpy as np

from tests.wild import _fit


def main(jit=False):
    model, batches = _fit.sines()
    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build(model.trainable_variables)
    frozen = [v.value for v in model.non_trainable_variables]

    def loss_of(weights, x, y):
        guess, _ = model.stateless_call(weights, frozen, x, training=True)
        return jnp.mean(jnp.square(y - guess))

    def of_task(weights, x, y):
        grads = jax.grad(loss_of)(weights, x[:10], y[:10])
        both = zip(weights, grads, strict=True)
        fast = [weight - 0.05 * grad for weight, grad in both]
        return loss_of(fast, x[10:], y[10:])

    def of_tasks(weights, xs, ys):
        return jnp.mean(jax.vmap(of_task, (None, 0, 0))(weights, xs, ys))

    @jax.jit
    def step(weights, slots, xs, ys):
        loss, grads = jax.value_and_grad(of_tasks)(weights, xs, ys)
        weights, slots = optimizer.stateless_apply(slots, grads, weights)
        return loss, (weights, slots)

    used = model.trainable_variables, optimizer.variables
    state = [[v.value for v in variables] for variables in used]
    losses = []
    for x, y in batches:
        loss, state = step(*state, x, y)
        losses.append(float(loss))
    return [np.mean(losses[:8]), np.mean(losses[-8:])]
