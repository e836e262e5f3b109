"""Sums inside a model that exceed float16's range lose no step.

A weight gradient is a sum over rows, pixels, time steps or tokens. Each loop
here trains in float32 and in 16 bit from the same weights on the same data.
"""

import functools

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfmix
from tests import loops, steps

ON_JAX = keras.backend.backend() == "jax"
WAYS = ("fit", "loop", "jit") if ON_JAX else ("fit", "loop", "graph", "jit")
EPOCHS = 5
# This tolerance is for the losses of epochs.
WITHIN = 0.05


def raw_features(rng):
    """Tabular data in their usual units, as in California housing."""
    x = rng.random((512, 8)) * [10, 50, 10, 2, 5000, 5, 40, 120]
    y = x @ rng.normal(size=8) * 0.02
    model = keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(32, "relu"),
            layers.Dense(32, "relu"),
            layers.Dense(1),
        ]
    )
    return model, x, y[:, None], 0.01, "mean"


def raw_pixels(rng):
    """A small network for super-resolution on pixels from 0 to 255."""
    x = (rng.random((8, 24, 24, 3)) * 255).astype("float32")
    y = ops.convert_to_numpy(ops.image.resize(x, (48, 48), "bilinear"))
    inputs = keras.Input((24, 24, 3))
    h = start = layers.Conv2D(16, 3, padding="same")(inputs)
    for _ in range(2):
        r = layers.Conv2D(16, 3, padding="same", activation="relu")(h)
        h = layers.Add()([h, layers.Conv2D(16, 3, padding="same")(r)])
    h = layers.Conv2DTranspose(12, 2, strides=2)(layers.Add()([h, start]))
    outputs = layers.Conv2D(3, 1)(h)
    return keras.Model(inputs, outputs), x, y, 1e-3, "absolute"


def summed_pixels(rng):
    """A loss that is summed over 2**17 pixels."""
    x = rng.random((2, 256, 256, 1))
    y = np.round(x)
    model = keras.Sequential(
        [
            keras.Input((256, 256, 1)),
            layers.Conv2D(4, 3, padding="same", activation="relu"),
            layers.Conv2D(1, 1),
        ]
    )
    return model, x, y, 1e-3, "sum"


def many_steps(rng, steps):
    """A recurrent network over many time steps."""
    x = rng.normal(size=(16, steps, 4))
    y = x.mean(axis=(1, 2), keepdims=False)[:, None] * 10 + 3
    model = keras.Sequential(
        [keras.Input((steps, 4)), layers.GRU(8), layers.Dense(1)]
    )
    return model, x, y, 0.01, "mean"


def frequent_token(rng):
    """A token that fills half of each batch."""
    x = rng.integers(0, 100, (32, 512))
    x[:, ::2] = 7
    y = (x == 3).sum(1, keepdims=True) * 10
    model = keras.Sequential(
        [
            keras.Input((512,), dtype="int32"),
            layers.Embedding(100, 8),
            layers.Dense(8, "relu"),
            layers.GlobalAveragePooling1D(),
            layers.Dense(1),
        ]
    )
    return model, x, y, 0.01, "mean"


def shared_layer(rng):
    """A layer that is used eight times."""
    x = rng.normal(size=(2048, 16)) * 30
    y = x[:, :1] * 2 + 100
    inputs = keras.Input((16,))
    layer, h = layers.Dense(16, "relu"), inputs
    for _ in range(8):
        h = layers.Add()([h, layer(h)])
    model = keras.Model(inputs, layers.Dense(1)(h))
    return model, x, y, 1e-4, "mean"


MODELS = {
    "raw_features": raw_features,
    "raw_pixels": raw_pixels,
    "summed_pixels": summed_pixels,
    "steps_200": functools.partial(many_steps, steps=200),
    "steps_2000": functools.partial(many_steps, steps=2000),
    "frequent_token": frequent_token,
    "shared_layer": shared_layer,
}


def loss_of(kind, y, predicted):
    error = ops.subtract(ops.cast(predicted, "float32"), y)
    if kind == "absolute":
        return ops.mean(ops.abs(error))
    square = ops.square(error)
    return ops.sum(square) if kind == "sum" else ops.mean(square)


def epoch_losses(policy, name, way):
    """Returns the loss of each epoch, and the number of applied steps."""
    tfmix.set_global_policy(policy)
    keras.utils.set_random_seed(0)
    model, x, y, rate, kind = MODELS[name](np.random.default_rng(0))
    x = x if x.dtype.kind == "i" else x.astype("float32")
    y = np.asarray(y, "float32")
    optimizer = keras.optimizers.Adam(rate)
    half = len(x) // 2
    batches = [(x[:half], y[:half]), (x[half:], y[half:])]
    if way == "fit":
        model.compile(optimizer, lambda y, p: loss_of(kind, y, p))
        losses = model.fit(
            x, y, batch_size=half, epochs=EPOCHS, shuffle=False, verbose=0
        ).history["loss"]
        return losses, int(model.optimizer.iterations)
    mode = {"loop": "eager", "jit": steps.MODES[-1]}.get(way, way)
    loop = loops.Loop(model, optimizer, mode, lambda y, p: loss_of(kind, y, p))
    tensors = [[*map(ops.convert_to_tensor, batch)] for batch in batches]
    losses = [float(loop.step(*b)) for _ in range(EPOCHS) for b in tensors]
    means = [sum(losses[n : n + 2]) / 2 for n in range(0, len(losses), 2)]
    return means, int(optimizer.iterations)


def cases():
    """Yields each model one way in the quick tier, and all ways otherwise."""
    quick = {
        ("raw_features", way, policy)
        for way in WAYS
        for policy in ("mixed_float16", "mixed_bfloat16")
    }
    quick |= {
        (name, "jit", "mixed_float16")
        for name in MODELS
        if name != "steps_2000" or ON_JAX
    }
    quick |= {("frequent_token", "jit", "mixed_bfloat16")}
    for name in MODELS:
        for way in WAYS:
            for policy in ("mixed_float16", "mixed_bfloat16"):
                slow = (name, way, policy) not in quick
                marks = [pytest.mark.slow] if slow else []
                yield pytest.param(name, way, policy, marks=marks)


@pytest.mark.costly
@pytest.mark.parametrize(("name", "way", "policy"), list(cases()))
def test_every_epoch_is_as_in_float32(name, way, policy):
    right, steps = epoch_losses("float32", name, way)
    found, applied = epoch_losses(policy, name, way)
    assert applied == steps == 2 * EPOCHS
    # bfloat16 rounds inputs to 8 bits, whatever is summed.
    within = WITHIN
    np.testing.assert_allclose(found, right, rtol=within)


def test_a_loop_that_loses_a_step_differs():
    right, _ = epoch_losses("float32", "raw_features", "loop")
    lost = [right[0], *right[:-1]]
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(lost, right, rtol=WITHIN)
