"""A language model: a mean over 2,048 tokens, sparse rows of an embedding."""

import keras
import tensorflow as tf

from tests.wild import _fit


def main(jit=False):
    model, batches = _fit.text()
    optimizer = keras.optimizers.Adam(0.01)
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function(jit_compile=jit)
    def train_step(x, y):
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = loss_fn(y, logits)
        grads = tape.gradient(loss, model.trainable_weights)
        grads, _ = tf.clip_by_global_norm(grads, 1.0)
        optimizer.apply(grads, model.trainable_weights)
        return loss

    optimizer.build(model.trainable_weights)
    losses = []
    for batch in batches:
        x, y = tf.constant(batch[:, :-1]), tf.constant(batch[:, 1:])
        losses.append(float(train_step(x, y)))
    return losses
