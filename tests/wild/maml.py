"""MAML on sine waves: a step inside the loss, with `stateless_call`."""

import keras
import numpy as np
import tensorflow as tf

from tests.wild import _fit


def main(jit=False):
    model, batches = _fit.sines()
    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build(model.trainable_variables)

    def loss_of(weights, x, y):
        frozen = model.non_trainable_variables
        guess, _ = model.stateless_call(weights, frozen, x, training=True)
        return tf.reduce_mean(tf.square(y - guess))

    @tf.function(jit_compile=jit)
    def step(xs, ys):
        total = 0.0
        with tf.GradientTape() as tape:
            weights = [v.value for v in model.trainable_variables]
            tape.watch(weights)
            for task in range(4):
                x, y = xs[task], ys[task]
                with tf.GradientTape() as inner:
                    inner.watch(weights)
                    loss = loss_of(weights, x[:10], y[:10])
                grads = inner.gradient(loss, weights)
                both = zip(weights, grads, strict=True)
                fast = [weight - 0.05 * grad for weight, grad in both]
                total += loss_of(fast, x[10:], y[10:]) / 4
        grads = tape.gradient(total, weights)
        optimizer.apply(grads, model.trainable_variables)
        return total

    losses = []
    for x, y in batches:
        losses.append(float(step(tf.constant(x), tf.constant(y))))
    return [np.mean(losses[:8]), np.mean(losses[-8:])]
