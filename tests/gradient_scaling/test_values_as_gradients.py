"""A variable whose gradient is its next value gets that value (float8)."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfmix
from tests import loops, steps

X = np.random.default_rng(0).normal(size=(64, 16)).astype("float32")
Y = np.random.default_rng(1).normal(3.0, size=(64, 4)).astype("float32")
STEPS = 4
# Rounding in float16, and to other neighbours in float8.
WITHIN = 0.01
LAYERS = {
    "dense": layers.Dense,
    "einsum": lambda units, **of: layers.EinsumDense("ab,bc->ac", units, **of),
}
# In eager mode, Keras cannot train float8 under TensorFlow, even in float32.
WAYS = [f"{run} {mode}" for run in ("fit", "loop") for mode in steps.MODES[1:]]


def network(policy, layer):
    tfmix.set_global_policy(policy)
    keras.utils.set_random_seed(0)
    hidden = LAYERS[layer](32, activation="tanh")
    last = layers.Dense(4, dtype="float32")
    model = keras.Sequential([keras.Input((16,)), hidden, last])
    hidden.quantize("float8")
    return model


def by_fit(model, mode):
    model.compile(
        keras.optimizers.SGD(0.05),
        "mse",
        jit_compile=mode in ("xla", "jit"),
    )
    fitted = model.fit(X, Y, batch_size=64, epochs=STEPS, verbose=0)
    return fitted.history["loss"]


def by_loop(model, mode):
    loop = loops.Loop(model, keras.optimizers.SGD(0.05), mode)
    x, y = map(ops.convert_to_tensor, (X, Y))
    return [float(loop.step(x, y)) for _ in range(STEPS)]


def trained(policy, layer, way):
    model = network(policy, layer)
    run, mode = way.split()
    losses = {"fit": by_fit, "loop": by_loop}[run](model, mode)
    values = {
        variable.name: ops.convert_to_numpy(variable)
        for variable in model.layers[0].trainable_variables
        if variable.overwrite_with_gradient
    }
    # The gradient is scaled where Keras quantizes it.
    of_gradient = [name for name in values if name.startswith("outputs_grad")]
    return losses, values, [values.pop(name) for name in of_gradient]


@pytest.mark.costly
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layer", LAYERS)
def test_keras_float8_trains_as_in_float32(layer, way):
    right, values, _ = trained("float32", layer, way)
    losses, found, of_gradient = trained("mixed_float16", layer, way)
    np.testing.assert_allclose(losses, right, rtol=WITHIN)
    assert sorted(found) == sorted(values)
    assert len(values) == 4
    for name, value in found.items():
        np.testing.assert_allclose(value, values[name], rtol=WITHIN)
    for value in of_gradient:
        assert np.isfinite(value).all()
        assert value.max() > 0
