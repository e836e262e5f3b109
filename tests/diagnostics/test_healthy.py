"""Healthy models raise no alarm, before and after 200 steps, and skip none."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfmix
from tfmix.callbacks import numerics_monitor
from tfmix.diagnostics import check
from tfmix.loss_scaling import optimizer as scaling
from tfmix.policy import policy as policies

BATCH, STEPS = 32, 200
CROSS_ENTROPY = "sparse_categorical_crossentropy"


@pytest.fixture(scope="module")
def digits():
    """Real scanned digits, 8 by 8, and their labels."""
    datasets = pytest.importorskip("sklearn.datasets")
    x, y = datasets.load_digits(return_X_y=True)
    return (x / 16).astype("float32").reshape(-1, 8, 8), y


def classifier(inputs, hidden):
    logits = layers.Dense(10)(hidden)
    softmax = layers.Activation("softmax", dtype="float32")
    return keras.Model(inputs, softmax(logits))


def cnn():
    inputs = keras.Input((8, 8))
    hidden = layers.Reshape((8, 8, 1))(inputs)
    hidden = layers.Conv2D(16, 3, activation="relu")(hidden)
    hidden = layers.BatchNormalization()(hidden)
    hidden = layers.MaxPooling2D()(layers.Dropout(0.2)(hidden))
    return classifier(inputs, layers.Flatten()(hidden))


def transformer():
    inputs = keras.Input((8, 8))
    hidden = layers.Dense(16)(inputs)
    attention = layers.MultiHeadAttention(2, 8, dropout=0.1)
    hidden = layers.LayerNormalization()(hidden + attention(hidden, hidden))
    wide = layers.Dense(32, activation="gelu")(hidden)
    hidden = layers.LayerNormalization()(hidden + layers.Dense(16)(wide))
    return classifier(inputs, layers.GlobalAveragePooling1D()(hidden))


def lstm():
    inputs = keras.Input((8, 8))
    return classifier(inputs, layers.LSTM(16)(inputs))


def gru():
    inputs = keras.Input((8, 8))
    hidden = layers.GRU(16, return_sequences=True)(inputs)
    return classifier(inputs, layers.Bidirectional(layers.GRU(8))(hidden))


def resnet():
    inputs = keras.Input((8, 8))
    hidden = layers.Reshape((8, 8, 1))(inputs)
    hidden = layers.Conv2D(8, 3, padding="same")(hidden)
    for stride in (1, 2, 1):
        short = layers.Conv2D(8, 1, stride)(hidden)
        for step in (stride, 1):
            hidden = layers.BatchNormalization()(hidden)
            hidden = layers.ReLU()(hidden)
            hidden = layers.Conv2D(8, 3, step, padding="same")(hidden)
        hidden = layers.Add()([hidden, short])
    return classifier(inputs, layers.GlobalAveragePooling2D()(hidden))


class Sampling(layers.Layer):
    """Samples a code, and adds the divergence to the loss."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.seed = keras.random.SeedGenerator(1)

    def call(self, inputs):
        mean, log_variance = ops.split(ops.cast(inputs, "float32"), 2, -1)
        spread = ops.exp(log_variance) - log_variance - 1.0
        self.add_loss(5e-3 * ops.mean(ops.square(mean) + spread))
        noise = keras.random.normal(ops.shape(mean), seed=self.seed)
        return mean + ops.exp(0.5 * log_variance) * noise


def vae():
    inputs = keras.Input((8, 8))
    hidden = layers.Dense(32, "relu")(layers.Flatten()(inputs))
    code = Sampling(dtype="float32")(layers.Dense(8)(hidden))
    hidden = layers.Dense(64)(layers.Dense(32, "relu")(code))
    picture = layers.Activation("sigmoid", dtype="float32")(hidden)
    return keras.Model(inputs, layers.Reshape((8, 8))(picture))


BUILDERS = (cnn, transformer, lstm, gru, resnet, vae)


def made(build, digits, policy="mixed_float16"):
    keras.utils.set_random_seed(1)
    tfmix.set_global_policy(policy)
    x, labels = digits
    model = build()
    is_vae = build is vae
    return model, x, x if is_vae else labels, "mse" if is_vae else CROSS_ENTROPY


def assert_healthy(model, x, y, loss, policy="mixed_float16"):
    report = check.check(model, x[:BATCH], y[:BATCH], loss=loss)
    assert report.healthy, str(report)
    suggested = report.suggested_policy(progress=False)
    assert suggested == policies.Policy(policy)


@pytest.mark.slow
@pytest.mark.parametrize("build", BUILDERS)
def test_no_step_of_the_first_200_is_skipped_and_no_alarm_raised(build, digits):
    model, x, y, loss = made(build, digits)
    assert_healthy(model, x, y, loss)
    optimizer = scaling.LossScaleOptimizer(keras.optimizers.Adam(3e-3))
    jit = keras.backend.backend() == "jax"
    model.compile(optimizer, loss, jit_compile=jit)
    monitor = numerics_monitor.NumericsMonitor(every=25)
    count = BATCH * (len(x) // BATCH)
    epochs = -(-STEPS * BATCH // count)
    history = model.fit(
        x[:count],
        y[:count],
        batch_size=BATCH,
        epochs=epochs,
        verbose=0,
        callbacks=[monitor],
    ).history["loss"]
    assert optimizer.skipped_steps == 0
    assert int(np.array(optimizer.iterations)) >= STEPS
    assert monitor.events == []
    assert history[-1] < history[0]
    # Trained weights and small gradients must be as healthy as at the start.
    assert_healthy(model, x, y, loss)


@pytest.mark.slow
@pytest.mark.parametrize("build", BUILDERS)
def test_bfloat16_needs_no_rule_either(build, digits):
    policy = "mixed_bfloat16"
    assert_healthy(*made(build, digits, policy), policy)
