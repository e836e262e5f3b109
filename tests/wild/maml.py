"""MAML on sine waves: a step inside the loss, with `stateless_call`."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers


def main(jit=False):
    rng = np.random.default_rng(0)
    model = keras.Sequential(
        [
            keras.Input((1,)),
            layers.Dense(40, activation="tanh"),
            layers.Dense(40, activation="tanh"),
            layers.Dense(1),
        ]
    )
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
    for _ in range(32):
        x = rng.uniform(-5, 5, (4, 20, 1)).astype("float32")
        high, phase = rng.uniform(0.5, 2, (2, 4, 1, 1))
        y = (high * np.sin(x + phase)).astype("float32")
        losses.append(float(step(tf.constant(x), tf.constant(y))))
    return [np.mean(losses[:8]), np.mean(losses[-8:])]
