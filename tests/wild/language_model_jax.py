"""A language model in JAX: a mean over 2,048 tokens, clipped by its norm."""

import jax
import jax.numpy as jnp
import keras

from tests.wild import _fit


def main(jit=False):
    model, batches = _fit.text()
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def loss_of(trainable, frozen, x, y):
        logits, frozen = model.stateless_call(trainable, frozen, x)
        return loss_fn(y, logits), frozen

    @jax.jit
    def step(trainable, frozen, slots, x, y):
        grad_fn = jax.value_and_grad(loss_of, has_aux=True)
        (loss, frozen), grads = grad_fn(trainable, frozen, x, y)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in grads))
        grads = [g / jnp.maximum(norm, 1.0) for g in grads]
        trainable, slots = optimizer.stateless_apply(slots, grads, trainable)
        return loss, (trainable, frozen, slots)

    these = model.trainable_variables, model.non_trainable_variables
    state = [[v.value for v in vs] for vs in (*these, optimizer.variables)]
    losses = []
    for batch in batches:
        loss, state = step(*state, batch[:, :-1], batch[:, 1:])
        losses.append(float(loss))
    return losses
