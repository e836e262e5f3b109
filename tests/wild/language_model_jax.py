"""A language model in JAX: a mean over 2,048 tokens, clipped by its norm."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
from keras import layers
from sklearn import datasets


def tokens():
    loaders = "digits iris wine breast_cancer diabetes".split()
    texts = [getattr(datasets, f"load_{name}")().DESCR for name in loaders]
    words = " ".join(texts).split()
    vocabulary, ids = np.unique(words, return_inverse=True)
    return len(vocabulary), ids.astype("int32")


def main(jit=False):
    count, ids = tokens()
    starts = np.random.default_rng(0).integers(0, len(ids) - 65, 32 * 24)
    lines = np.stack([ids[i : i + 65] for i in starts])
    model = keras.Sequential(
        [
            keras.Input((64,), dtype="int32"),
            layers.Embedding(count, 32),
            layers.Conv1D(64, 4, padding="causal", activation="gelu"),
            layers.LayerNormalization(),
            layers.Dense(count),
        ]
    )
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
    for batch in np.split(lines, 24):
        loss, state = step(*state, batch[:, :-1], batch[:, 1:])
        losses.append(float(loss))
    return losses
