"""WGAN-GP: a penalty on the critic's gradient by its input."""

import keras
import tensorflow as tf
from keras import layers
from sklearn import datasets


class WGAN(keras.Model):
    def __init__(self):
        super().__init__()
        self.critic = keras.Sequential(
            [layers.Dense(32, "relu"), layers.Dense(1)]
        )
        self.generator = keras.Sequential(
            [layers.Dense(32, "relu"), layers.Dense(64)]
        )

    def compile(self, c_optimizer, g_optimizer, **kwargs):
        super().compile(**kwargs)
        self.c_optimizer, self.g_optimizer = c_optimizer, g_optimizer

    def penalty(self, real, made):
        part = tf.random.uniform((tf.shape(real)[0], 1))
        between = real + part * (made - real)
        with tf.GradientTape() as tape:
            tape.watch(between)
            score = self.critic(between, training=True)
        slope = tf.sqrt(tf.reduce_sum(tape.gradient(score, between) ** 2, -1))
        return tf.reduce_mean((slope - 1.0) ** 2)

    def train_step(self, real):
        noise = tf.random.normal((tf.shape(real)[0], 4))
        with tf.GradientTape() as tape:
            made = self.generator(noise)
            scores = self.critic(made), self.critic(real)
            loss = tf.reduce_mean(scores[0]) - tf.reduce_mean(scores[1])
            loss += 10.0 * self.penalty(real, made)
        weights = self.critic.trainable_weights
        self.c_optimizer.apply(tape.gradient(loss, weights), weights)
        with tf.GradientTape() as tape:
            wanted = -tf.reduce_mean(self.critic(self.generator(noise)))
        weights = self.generator.trainable_weights
        self.g_optimizer.apply(tape.gradient(wanted, weights), weights)
        return {"total": loss}


def main(jit=False):
    x = datasets.load_digits().data[:512].astype("float32") / 16
    model = WGAN()
    model.critic.build((None, 64))
    model.generator.build((None, 4))
    model.built = True
    adam = [keras.optimizers.Adam(1e-3) for _ in range(2)]
    model.compile(*adam, jit_compile=jit)
    return model.fit(x, batch_size=64, epochs=4, verbose=0).history["total"]
