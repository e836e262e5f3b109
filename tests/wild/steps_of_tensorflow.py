"""Losses that people write into a `train_step` with a tape, as in the guide."""

import keras
import tensorflow as tf
from keras import layers

from tests.wild import _fit


class Trained(keras.Model):
    def __init__(self, hidden=16, units=1, activation="relu"):
        super().__init__()
        self.net = keras.Sequential(
            [layers.Dense(hidden, activation), layers.Dense(units)]
        )

    def call(self, x):
        return self.net(x)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.loss_of(data)
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"total": loss}


class Guide(Trained):
    """The guide's own `train_step`."""

    def loss_of(self, data):
        x, y = data
        return tf.reduce_mean(tf.square(y - self(x, training=True)))


class Contrastive(Trained):
    """SimCLR with two views: similarities with raw `tf` on float32 labels."""

    def loss_of(self, x):
        views = [self(x + 0.1 * tf.random.normal(tf.shape(x))) for _ in "ab"]
        a, b = (tf.math.l2_normalize(v, axis=1) for v in views)
        logits = tf.matmul(a, b, transpose_b=True) / tf.constant(0.1)
        loss = tf.nn.softmax_cross_entropy_with_logits(
            tf.eye(tf.shape(x)[0]), logits
        )
        return tf.reduce_mean(loss)


class Denoiser(Trained):
    """Noise and rates are made in float32 in the step."""

    def loss_of(self, x):
        noise = tf.random.normal(tf.shape(x))
        time = tf.random.uniform((tf.shape(x)[0], 1))
        signal, rate = tf.cos(time), tf.sin(time)
        noisy = tf.concat([signal * x + rate * noise, rate**2], axis=1)
        guess = self.net(noisy, training=True)
        return tf.reduce_mean(tf.abs(noise - guess))


class Physics(Trained):
    """A residual with derivatives of the output by the input."""

    def loss_of(self, data):
        x, y = data
        with tf.GradientTape() as inner:
            inner.watch(x)
            u = self(x, training=True)
        slope = inner.gradient(u, x)
        residual = tf.reduce_mean((slope - 1.0) ** 2)
        return tf.reduce_mean((u - y) ** 2) + 0.1 * residual


class Masked(Trained):
    """Masked autoencoding: single layers are called in the step."""

    def loss_of(self, x):
        keep = tf.cast(tf.random.uniform(tf.shape(x)) > 0.3, tf.float32)
        embed, decode = self.net.layers
        h = embed(x * keep)
        guess = decode(h + tf.random.normal(tf.shape(h), stddev=0.01))
        return tf.reduce_mean((1 - keep) * (guess - x) ** 2)


class SharpnessAware(Trained):
    """SAM: gradients, a step uphill, gradients again."""

    def train_step(self, data):
        x, y = data
        weights = self.trainable_variables
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        ups = [0.01 * tf.sign(g) for g in tape.gradient(loss, weights)]
        for weight, up in zip(weights, ups, strict=True):
            weight.assign_add(up)
        with tf.GradientTape() as tape:
            again = self.compute_loss(x, y, self(x, training=True))
            again = self.optimizer.scale_loss(again)
        gradients = tape.gradient(again, weights)
        for weight, up in zip(weights, ups, strict=True):
            weight.assign_sub(up)
        self.optimizer.apply(gradients, weights)
        return {"total": loss}


class Ranking(Trained):
    """A ranking loss, and top-k accuracy with raw `tf`."""

    def train_step(self, data):
        x, y = data
        y = tf.cast(tf.reduce_sum(tf.abs(y), -1), tf.int32) % 5
        with tf.GradientTape() as tape:
            logits = self(x, training=True)
            loss = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
            loss = tf.reduce_mean(loss)
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        hits = tf.math.in_top_k(y, logits, k=2)
        top = tf.reduce_mean(tf.cast(hits, tf.float32))
        return {"total": loss, "top2": top}


def on_inputs(jit, model, rows=64, batch_size=16, epochs=4):
    """Fits a model that learns from its inputs alone."""
    x, _ = _fit.numbers(rows)
    if isinstance(model, Masked):
        model(x[:1])
    model.compile("adam", jit_compile=jit)
    how = {"batch_size": batch_size, "epochs": epochs}
    return _fit.losses(model, x, name="total", **how)


def on_targets(jit, model):
    x, y = _fit.numbers()
    model.compile("adam", "mse", jit_compile=jit)
    if isinstance(model, SharpnessAware):
        model(x[:1])
        model.optimizer.build(model.trainable_variables)
    return _fit.losses(model, x, y, name="total")


SCRIPTS = {
    "contrastive": lambda jit: on_inputs(jit, Contrastive(units=8)),
    "custom_train_step": lambda jit: on_targets(jit, Guide()),
    "diffusion": lambda jit: on_inputs(jit, Denoiser(32, 8), 1024, 256, 16),
    "in_top_k": lambda jit: on_targets(jit, Ranking(units=5)),
    "physics_informed": lambda jit: on_targets(jit, Physics(activation="tanh")),
    "plain_layers_in_step": lambda jit: on_inputs(jit, Masked(units=8)),
    "sharpness_aware": lambda jit: on_targets(jit, SharpnessAware()),
}
