"""A model with 16-bit layers gets its record however it was made."""

import keras
import numpy as np
import pytest
from keras import layers

import tfmix
from tests import helpers
from tests.promises import test_one_program as one_program
from tfmix._keras import replacing
from tfmix.autocast import record as mixed_model

POLICIES = ("mixed_float16", "mixed_bfloat16")


def make():
    return keras.Sequential(
        [
            keras.Input((3,)),
            layers.Dense(4),
            layers.BatchNormalization(),
            layers.Dense(1, name="last"),
            tfmix.float32_output(),
        ]
    )


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.inner = make()

    def call(self, x):
        return self.inner(x)


@pytest.mark.parametrize("kind", [make, Subclassed])
@pytest.mark.parametrize(
    "wrap", [lambda sgd: sgd, tfmix.LossScaleOptimizer], ids=["bare", "wrapped"]
)
def test_a_float32_model_is_left_alone(kind, wrap):
    def compiled(watched):
        replacing.want(replacing.COMPILE, watched)
        model, optimizer = kind(), wrap(keras.optimizers.SGD(0.1))
        before = set(vars(model))
        model.compile(optimizer, "mse")
        assert model.optimizer is optimizer
        assert not helpers.is_guarded(model)
        config = model._compile_config.config
        return set(vars(model)) - before, config.keys(), model

    *watched, model = compiled(True)
    *alone, plain = compiled(False)
    assert watched == alone
    if helpers.ON_JAX and kind is make:
        assert one_program.program(model) == one_program.program(plain)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_model_inside_a_loaded_model_gets_a_record(policy):
    with tfmix.policy_scope(policy):
        part = keras.Sequential(
            [keras.Input((1,)), layers.Embedding(5000, 3), layers.Flatten()],
            name="part",
        )
        inputs = keras.Input((1,))
        model = keras.Model(inputs, layers.Dense(1)(part(inputs)))
    loaded = helpers.reloaded(model)
    loaded.compile("adam", "mse")
    inner = loaded.get_layer("part")
    assert mixed_model.policy_of(inner).name == policy
    # 2049 is 2048 in float16.
    ids = np.array([[2049.0]], "float32")
    assert inner.predict(ids, verbose=0).dtype == "float32"
    for ours, expected in ((inner, part), (loaded, model)):
        found = ours.predict(ids, verbose=0)
        np.testing.assert_array_equal(found, expected.predict(ids, verbose=0))
