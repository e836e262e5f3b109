"""A language model: a mean over 2,048 tokens, sparse rows of an embedding."""

import keras
import numpy as np
import tensorflow as tf
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
    for batch in np.split(lines, 24):
        x, y = tf.constant(batch[:, :-1]), tf.constant(batch[:, 1:])
        losses.append(float(train_step(x, y)))
    return losses
