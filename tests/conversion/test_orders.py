"""Into 16 bit and out again, with another optimizer compiled in between."""

import keras
import numpy as np
import pytest

from tfmix.conversion import convert

X = np.random.default_rng(0).normal(size=(32, 6)).astype("float32")
Y = X[:, :1] * 0.5
# Tracing would take longer than a few eager steps of such a small model. JAX
# has to compile.
EAGERLY = keras.backend.backend() == "tensorflow"
OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "plain": lambda: keras.optimizers.SGD(0.05),
    "adam": lambda: keras.optimizers.Adam(0.02),
}


def small_model():
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(5, activation="tanh", name="body"),
            keras.layers.Dense(1, name="head"),
        ]
    )


def compiled(model, optimizer):
    model.compile(optimizer, "mse", jit_compile=False, run_eagerly=EAGERLY)
    return model


def losses(model, epochs=1):
    history = model.fit(
        X, Y, batch_size=16, epochs=epochs, shuffle=False, verbose=0
    )
    return history.history["loss"]


def assert_float32(model):
    for layer in model._flatten_layers():
        assert layer.compute_dtype == layer.variable_dtype == "float32"
    assert {v.dtype for v in model.variables if "seed" not in v.path} == {
        "float32"
    }


@pytest.mark.costly
@pytest.mark.parametrize("way_back", ["undo", "float32"])
@pytest.mark.parametrize("policy", ["mixed_float16", "float16"])
@pytest.mark.parametrize(
    ("first", "second"),
    [("momentum", "plain"), ("plain", "adam"), ("adam", "momentum")],
)
def test_an_optimizer_compiled_in_16_bit_continues_in_float32(
    first, second, policy, way_back
):
    model = compiled(small_model(), OPTIMIZERS[first]())
    losses(model)
    report = convert.apply_policy(model, policy)
    mine = OPTIMIZERS[second]()
    compiled(model, mine)
    losses(model)
    steps = int(mine.iterations)
    assert steps > 0
    if way_back == "undo":
        report.undo()
    else:
        convert.apply_policy(model, "float32")
    assert_float32(model)
    assert model.optimizer is mine, "not the optimizer that was compiled last"
    assert int(mine.iterations) == steps
    before = losses(model)[0]
    assert int(mine.iterations) == steps + 2
    assert losses(model, 8)[-1] < before
    assert_float32(model)
