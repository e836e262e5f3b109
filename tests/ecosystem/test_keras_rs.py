"""KerasRS's layers compute and train under a policy like in float32."""

import keras
import numpy as np
import pytest
from keras import ops

import tfmix
from tests.ecosystem.small_models import BOUNDS

layers = pytest.importorskip("keras_rs").layers
X = np.random.default_rng(0).normal(size=(32, 8)).astype("float32")


def crossed(x):
    return layers.FeatureCross(projection_dim=4)(x)


def dotted(x):
    return layers.DotInteraction()([x, keras.layers.Dense(8)(x)])


def network(kind, policy):
    keras.utils.set_random_seed(1)
    with tfmix.policy_scope(policy):
        inputs = keras.Input((8,))
        outputs = tfmix.float32_output()(kind(inputs))
        model = keras.Model(inputs, outputs)
        model.compile("adam", "mse", jit_compile=False)
    return model


@pytest.mark.parametrize("policy", BOUNDS)
@pytest.mark.parametrize("kind", [crossed, dotted])
def test_a_layer_computes_as_in_float32(kind, policy):
    exact, model = network(kind, "float32"), network(kind, policy)
    model.set_weights(exact.get_weights())
    wanted = exact.predict(X, verbose=0)
    error = np.max(np.abs(model.predict(X, verbose=0) - wanted))
    assert error < BOUNDS[policy] * np.max(np.abs(wanted))
    loss = model.fit(X, ops.zeros_like(wanted), verbose=0).history["loss"]
    assert np.all(np.isfinite(loss))
