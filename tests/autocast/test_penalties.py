"""Regularizers and added losses of 16-bit models, in float32."""

import keras
import numpy as np
import pytest
from keras import ops as kops

from tests import helpers
from tfmix.ops import stand_ins
from tfmix.policy import policy as policies


@pytest.fixture(autouse=True)
def _nothing_in_force_before_or_after():
    stand_ins.install(())
    yield
    stand_ins.install(())


class Penalised(keras.layers.Layer):
    """Adds the sum of squares of its input to the loss."""

    def call(self, x):
        self.add_loss(kops.sum(kops.square(x)))
        return x


def penalised_model(eager=False, dtype="mixed_float16"):
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(3, activity_regularizer="l2", dtype=dtype),
            Penalised(dtype=dtype),
        ]
    )
    model.compile("sgd", "mse", metrics=["mse"], run_eagerly=eager)
    return model


def batch():
    rng = np.random.default_rng(2)
    x = rng.normal(size=(8, 4)).astype("float32")
    return x, rng.normal(size=(8, 3)).astype("float32")


@pytest.mark.costly
@pytest.mark.parametrize("eager", [True, False])
def test_penalties_and_a_compiled_loss_add_up_in_float32(eager):
    x, y = batch()
    stand_ins.install([policies.SIXTEEN_BIT])
    model = penalised_model(eager)
    got = model.fit(x, y, batch_size=8, verbose=0).history["loss"][0]
    reference = penalised_model(eager, dtype="float32")
    history = reference.fit(x, y, batch_size=8, verbose=0).history
    expected = history["loss"][0]
    np.testing.assert_allclose(got, expected, **helpers.tolerance("float16"))


def test_a_penalty_outside_float16_is_finite_with_the_op_rules():
    if keras.backend.backend() != "tensorflow":
        pytest.skip("JAX arrays cannot carry the float32 value")
    stand_ins.install([policies.SIXTEEN_BIT, "sum"])
    layer = Penalised(dtype="float16")
    layer(np.ones((512, 512)))
    assert float(layer.losses[0]) == 262144.0


def test_an_activity_regularizer_of_large_outputs_is_finite():
    stand_ins.install([policies.SIXTEEN_BIT])
    layer = keras.layers.Activation(
        "linear", activity_regularizer="l2", dtype="float16"
    )
    layer(np.full((1, 4), 300.0))
    # This is 0.01 * 4 * 90000.
    np.testing.assert_allclose(
        float(layer.losses[0]), 3600.0, **helpers.tolerance("float32")
    )


def test_a_block_without_them_computes_as_keras_does():
    regularizer = keras.regularizers.L2(1.0)
    large = kops.full((4,), 300.0, "float16")
    stand_ins.install([policies.SIXTEEN_BIT])
    with stand_ins.block(()):
        assert np.isinf(float(regularizer(large)))
    assert float(regularizer(large)) == 360000.0
