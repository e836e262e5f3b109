"""Healthy models raise no alarm, before and after 200 steps, and skip none."""

import functools

import keras
import numpy as np
import pytest
from keras import layers

import tfmix
from tfmix.loss_scaling import optimizer as scaling
from tfmix.policy import policy as policies
from tfmix.tools.callbacks import numerics_monitor
from tfmix.tools.diagnostics import check

ROWS, BATCH, STEPS = 256, 32, 200
CROSS_ENTROPY = "sparse_categorical_crossentropy"


@functools.cache
def digits():
    """Real scanned digits, 8 by 8, and their labels."""
    datasets = pytest.importorskip("sklearn.datasets")
    x, y = datasets.load_digits(return_X_y=True)
    return (x / 16).astype("float32").reshape(-1, 8, 8), y


def ending(hidden, units, activation="linear"):
    logits = layers.Dense(units)(hidden)
    return layers.Activation(activation, dtype="float32")(logits)


def classifier(inputs, hidden):
    model = keras.Model(inputs, ending(hidden, 10, "softmax"))
    return model, *digits(), CROSS_ENTROPY


def transformer(rng):
    inputs = keras.Input((8, 8))
    hidden = layers.Dense(16)(inputs)
    attention = layers.MultiHeadAttention(2, 8, dropout=0.1)
    hidden = layers.LayerNormalization()(hidden + attention(hidden, hidden))
    wide = layers.Dense(32, activation="gelu")(hidden)
    hidden = layers.LayerNormalization()(hidden + layers.Dense(16)(wide))
    return classifier(inputs, layers.GlobalAveragePooling1D()(hidden))


def text_classifier(rng):
    """Padded and masked sentences, with two recurrent layers."""
    lengths = rng.integers(3, 21, ROWS)
    x = rng.integers(1, 400, (ROWS, 20))
    x[np.arange(20) >= lengths[:, None]] = 0
    inputs = keras.Input((20,), dtype="int32")
    hidden = layers.Embedding(400, 16, mask_zero=True)(inputs)
    hidden = layers.Bidirectional(layers.GRU(12, return_sequences=True))(hidden)
    hidden = layers.GRU(12)(hidden)
    model = keras.Model(inputs, ending(hidden, 1, "sigmoid"))
    return model, x, (x[:, :1] > 200).astype("float32"), "binary_crossentropy"


POLICIES = ("mixed_float16", "mixed_bfloat16")


def build_under(build, policy):
    keras.utils.set_random_seed(1)
    tfmix.set_global_policy(policy)
    return build(np.random.default_rng(2))


def assert_healthy(model, x, y, loss, policy):
    x, y = keras.tree.map_structure(lambda leaf: leaf[:BATCH], (x, y))
    report = check.check(model, x, y, loss=loss)
    assert report.healthy, str(report)
    suggested = report.suggested_policy()
    assert suggested == policies.Policy(policy)


@pytest.mark.costly
@pytest.mark.parametrize("policy", POLICIES)
def test_a_new_model_needs_no_rule(policy):
    assert_healthy(*build_under(transformer, policy), policy)


@pytest.mark.slow
@pytest.mark.parametrize("build", [transformer, text_classifier])
def test_no_step_of_the_first_200_is_skipped_and_no_alarm_raised(build):
    policy = "mixed_float16"
    model, x, y, loss = build_under(build, policy)
    assert_healthy(model, x, y, loss, policy)
    optimizer = scaling.LossScaleOptimizer(keras.optimizers.Adam(1e-3))
    jit = keras.backend.backend() == "jax"
    model.compile(optimizer, loss, jit_compile=jit)
    monitor = numerics_monitor.NumericsMonitor(every=25)
    count = BATCH * (len(keras.tree.flatten(x)[0]) // BATCH)
    x, y = keras.tree.map_structure(lambda leaf: leaf[:count], (x, y))
    settings = {"batch_size": BATCH, "verbose": 0, "callbacks": [monitor]}
    epochs = -(-STEPS * BATCH // count)
    history = model.fit(x, y, epochs=epochs, **settings).history["loss"]
    assert optimizer.skipped_steps == 0
    assert int(np.array(optimizer.iterations)) >= STEPS
    assert monitor.events == []
    assert history[-1] < history[0]
    # Trained weights and small gradients must be as healthy as at the start.
    assert_healthy(model, x, y, loss, policy)
