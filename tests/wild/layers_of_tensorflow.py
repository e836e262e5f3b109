"""Layers that people write with raw TensorFlow, in float32 as they know it."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.wild._fit import (
    conv,
    dense,
    embed,
    images,
    pool,
    rows,
    series,
    tokens,
)


class RandomColorAffine(layers.Layer):
    """A random image transformation as a layer, as in contrastive examples."""

    def __init__(self, brightness=0.3, jitter=0.1, **kwargs):
        super().__init__(**kwargs)
        self.brightness, self.jitter = brightness, jitter

    def call(self, images, training=True):
        if not training:
            return images
        size = tf.shape(images)[0]
        scales = 1 + tf.random.uniform(
            (size, 1, 1, 1), -self.brightness, self.brightness
        )
        jitter = tf.random.uniform((size, 1, 3, 3), -self.jitter, self.jitter)
        change = tf.eye(3, batch_shape=[size, 1]) * scales + jitter
        return tf.clip_by_value(tf.matmul(images, change), 0, 1)


class Cutout(layers.Layer):
    """Cutout as a layer: random boxes drawn in `call`, raw TensorFlow."""

    def call(self, x, training=None):
        if not training:
            return x
        n = tf.shape(x)[0]
        centre = tf.random.uniform((n, 1, 1, 1), 0, 8)
        rows = tf.reshape(tf.range(8, dtype=tf.float32), (1, 8, 1, 1))
        inside = tf.cast(tf.abs(rows - centre) < 2, tf.float32)
        return x * (1 - inside)


class FNetBlock(layers.Layer):
    """FNet mixes tokens with a Fourier transform, in complex numbers."""

    def __init__(self, dim, **kwargs):
        super().__init__(**kwargs)
        self.ffn = keras.Sequential(
            [layers.Dense(2 * dim, activation="gelu"), layers.Dense(dim)]
        )
        self.norm1 = layers.LayerNormalization()
        self.norm2 = layers.LayerNormalization()

    def call(self, inputs):
        inp_complex = tf.cast(inputs, tf.complex64)
        fft = tf.math.real(tf.signal.fft2d(inp_complex))
        x = self.norm1(inputs + fft)
        return self.norm2(x + self.ffn(x))


class GraphConvolution(layers.Layer):
    """A graph layer: messages gathered and summed with raw `tf`."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(16)
        rng = np.random.default_rng(1)
        self.edges = rng.integers(0, 8, (2, 20))
        self.weights_of = tf.constant(rng.random(20), tf.float32)

    def call(self, x):
        h = self.dense(x)
        messages = (
            tf.gather(h, self.edges[0], axis=1) * self.weights_of[:, None]
        )
        summed = tf.math.unsorted_segment_sum(
            tf.transpose(messages, (1, 0, 2)), self.edges[1], 8
        )
        return tf.nn.relu(tf.transpose(summed, (1, 0, 2)) + h)


class Experts(layers.Layer):
    """Experts and a router that counts its load in float32."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.experts = [layers.Dense(16) for _ in range(3)]
        self.router = layers.Dense(3)

    def call(self, x):
        gates = tf.nn.softmax(tf.cast(self.router(x), tf.float32))
        self.add_loss(0.01 * tf.reduce_sum(tf.reduce_mean(gates, 0) ** 2))
        outs = tf.stack([expert(x) for expert in self.experts], -1)
        return tf.reduce_sum(outs * gates[:, None], -1)


class Mixup(layers.Layer):
    """Mixup inside the model, with shares drawn by raw TensorFlow."""

    def call(self, x, training=None):
        if not training:
            return x
        # Gamma and beta have no XLA kernel, even in float32.
        part = tf.random.uniform((tf.shape(x)[0], 1, 1, 1), 0.7, 1.0)
        return part * x + (1 - part) * tf.reverse(x, [0])


class Scale(layers.Layer):
    """A block that mixes dtypes two models deep."""

    def call(self, x):
        return x * tf.linspace(0.5, 1.5, x.shape[-1])


def tower(units):
    return keras.Sequential([layers.Dense(units, activation="relu"), Scale()])


class MinimalCell(layers.Layer):
    """A user's own recurrent cell that adds a float32 constant."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = self.state_size = units
        self.dense = layers.Dense(units)

    def build(self, shape):
        self.dense.build((shape[0], shape[1] + self.units))
        self.decay = tf.fill((self.units,), 0.9)

    def call(self, x, states):
        (h,) = states
        h = self.decay * h + tf.tanh(self.dense(tf.concat([x, h], -1)))
        return h, [h]


class Patches(layers.Layer):
    """ViT's patches: `tf.image` and an embedding of `ops.arange`."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.project = layers.Dense(16)
        self.position = layers.Embedding(4, 16)

    def call(self, x):
        p = tf.image.extract_patches(
            x, [1, 4, 4, 1], [1, 4, 4, 1], [1, 1, 1, 1], "VALID"
        )
        p = tf.reshape(p, (-1, 4, 4 * 4 * 8))
        return self.project(p) + self.position(tf.range(4))


class GlobalFilter(layers.Layer):
    """A global filter: a real FFT with complex weights in between."""

    def build(self, shape):
        bins = shape[1] // 2 + 1
        self.real = self.add_weight(shape=(bins, shape[2]))
        self.imag = self.add_weight(shape=(bins, shape[2]))

    def call(self, x):
        f = tf.signal.rfft(tf.transpose(x, (0, 2, 1)))
        f = f * tf.transpose(tf.complex(self.real, self.imag))[None]
        return tf.transpose(tf.signal.irfft(f), (0, 2, 1))


class SqueezeExcite(layers.Layer):
    """Squeeze and excite, the last product with a float32 temperature."""

    def __init__(self, filters, **kwargs):
        super().__init__(**kwargs)
        self.squeeze = layers.Dense(4, activation="relu")
        self.excite = layers.Dense(filters, activation="sigmoid")

    def call(self, x):
        pooled = tf.reduce_mean(x, axis=(1, 2))
        scale = self.excite(self.squeeze(pooled)) / tf.sqrt(2.0)
        return x * scale[:, None, None]


class Positions(layers.Layer):
    """Sinusoidal positions: a table of constants made in float32."""

    def build(self, shape):
        angle = np.arange(shape[1])[:, None] / 1e4 ** (
            np.arange(shape[2]) / shape[2]
        )
        self.table = np.sin(angle).astype("float32")

    def call(self, x):
        return tf.sqrt(16.0) * x + tf.constant(self.table)


class Decay(layers.Layer):
    """A user's own layer in `TimeDistributed`, on a short series."""

    def call(self, x):
        return x * tf.exp(-tf.range(16, dtype=tf.float32) / 16.0)

    def compute_output_shape(self, shape):
        return shape


class Block(layers.Layer):
    """A user's own block around Keras's attention, scaled in raw `tf`."""

    def __init__(self, dim, **kwargs):
        super().__init__(**kwargs)
        self.attend = layers.MultiHeadAttention(2, dim // 2)
        self.ffn = keras.Sequential(
            [layers.Dense(2 * dim, activation="relu"), layers.Dense(dim)]
        )
        self.norm = [layers.LayerNormalization(epsilon=1e-6) for _ in range(2)]

    def call(self, x):
        x = self.norm[0](x + self.attend(x, x) * tf.math.rsqrt(2.0))
        return self.norm[1](x + self.ffn(x))


class VectorQuantizer(layers.Layer):
    """VQ-VAE's codebook: distances, one-hot, straight-through gradient."""

    def build(self, shape):
        self.codes = self.add_weight(
            shape=(shape[-1], 12), initializer="uniform"
        )

    def call(self, x):
        far = tf.reduce_sum(self.codes**2, 0) - 2 * tf.matmul(x, self.codes)
        found = tf.one_hot(tf.argmin(far, 1), 12)
        quantized = tf.matmul(found, self.codes, transpose_b=True)
        commitment = tf.stop_gradient(quantized) - x
        codebook = quantized - tf.stop_gradient(x)
        self.add_loss(0.25 * tf.reduce_mean(commitment**2))
        self.add_loss(tf.reduce_mean(codebook**2))
        return x + tf.stop_gradient(quantized - x)


def spectrogram(x):
    """Lambdas over `tf.signal`: frames, windows, magnitudes."""
    frames = tf.signal.frame(tf.reshape(x, (-1, 16)), 8, 4)
    window = tf.signal.hann_window(8)
    return tf.abs(tf.signal.rfft(frames * window))


class Clipped(layers.Layer):
    """A user's own gate with `tf.where` over a float32 tensor."""

    def call(self, x):
        limit = tf.fill(tf.shape(x), 0.5)
        return tf.where(x > limit, limit, x)


TABLE = tf.constant([[0.1] * 8, [0.2] * 8, [0.3] * 8, [0.4] * 8])


def lambdas():
    """Lambdas with raw TensorFlow, and one inside `TimeDistributed`."""
    weights = tf.linspace(0.5, 1.5, 8)
    return (
        layers.TimeDistributed(layers.Dense(8, activation="relu")),
        layers.Lambda(lambda t: t + TABLE),
        layers.TimeDistributed(layers.Lambda(lambda t: t * weights)),
        layers.LSTM(8),
    )


SCRIPTS = {
    "color_affine": lambda jit: images(
        jit,
        layers.Rescaling(1.0),
        RandomColorAffine(),
        layers.Conv2D(8, 3, activation="relu"),
        pool(2),
    ),
    "cutout_layer": lambda jit: images(jit, conv(), Cutout(), pool(2)),
    "fnet": lambda jit: tokens(jit, embed(), FNetBlock(16), pool(1)),
    "graph_convolution": lambda jit: tokens(
        jit, embed(), GraphConvolution(), pool(1)
    ),
    "lambda_raw_tf": lambda jit: series(jit, (4, 6), *lambdas()),
    "mixture_of_experts": lambda jit: rows(jit, dense(), Experts()),
    "mixup_layer": lambda jit: images(jit, conv(), Mixup(), pool(2)),
    "nested_models": lambda jit: rows(
        jit, keras.Sequential([tower(16), tower(8)])
    ),
    "own_rnn_cell": lambda jit: series(
        jit, (5, 4), keras.Input((5, 4)), layers.RNN(MinimalCell(8))
    ),
    "patches_and_positions": lambda jit: images(
        jit, conv(), Patches(), pool(1)
    ),
    "spectral_filter": lambda jit: tokens(
        jit, embed(), GlobalFilter(), pool(1)
    ),
    "squeeze_excite": lambda jit: images(
        jit, conv(), SqueezeExcite(8), pool(2)
    ),
    "table_of_constants": lambda jit: tokens(
        jit, embed(), Positions(), pool(1)
    ),
    "time_distributed": lambda jit: tokens(
        jit,
        embed(),
        layers.TimeDistributed(Decay()),
        layers.Bidirectional(layers.GRU(8)),
    ),
    "transformer_block": lambda jit: tokens(jit, embed(), Block(16), pool(1)),
    "vector_quantizer": lambda jit: rows(jit, dense(), VectorQuantizer()),
    "wavelet_lambda": lambda jit: rows(
        jit, layers.Dense(16), layers.Lambda(spectrogram), layers.Flatten()
    ),
    "where_raw_tf": lambda jit: rows(jit, dense(), Clipped()),
}
