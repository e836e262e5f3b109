"""`float32_output` is a plain layer in float32, with or without tfmix."""

import keras
import numpy as np
import pytest

from tests import processes
from tfmix.autocast import float32_output, global_policy

SIXTEEN_BIT = ["mixed_float16", "mixed_bfloat16"]


@pytest.mark.parametrize("policy", SIXTEEN_BIT)
def test_float32_output_is_a_plain_activation_under_every_policy(policy):
    with global_policy.policy_scope(policy):
        layer = float32_output.float32_output("softmax", name="probabilities")
    assert type(layer) is keras.layers.Activation
    assert layer.dtype_policy == keras.DTypePolicy("float32")
    assert layer.name == "probabilities"
    config = layer.get_config()
    assert config["activation"] == "softmax"
    assert "tfmix" not in str(config)


def test_without_an_activation_the_values_are_only_cast():
    x = np.array([[70.0, -2.5, 0.1]], "float16")
    result = keras.ops.convert_to_numpy(float32_output.float32_output()(x))
    np.testing.assert_array_equal(result, x.astype("float32"))


@pytest.mark.parametrize(
    ("activation", "error", "message"),
    [
        # Keras names what it does not know.
        ("sofmax", ValueError, "sofmax"),
        (3, TypeError, "activation=3 of type int"),
        (keras.layers.Softmax(), TypeError, "of type Softmax"),
        (keras.layers.Softmax, TypeError, "must be the name"),
        (np.ones((2, 2)), TypeError, r"float32_output\('softmax'\)\(x\)"),
    ],
)
def test_a_wrong_activation_is_refused(activation, error, message):
    with pytest.raises(error, match=message):
        float32_output.float32_output(activation)


LOAD_WITHOUT_TFMIX = """
import sys, numpy as np, keras
x = np.load("x.npy")
for name in sys.argv[1:]:
    model = keras.models.load_model(name + ".keras", compile=False)
    np.save(name + ".npy", model.predict(x, verbose=0))
assert not any(name.split(".")[0] == "tfmix" for name in sys.modules)
"""


@pytest.mark.slow
def test_saved_models_predict_the_same_in_plain_keras(tmp_path):
    x = np.random.default_rng(1).normal(size=(8, 4)).astype("float32")
    np.save(tmp_path / "x.npy", x)
    expected = {}
    for policy in (*SIXTEEN_BIT, "float16", "O2"):
        with global_policy.policy_scope(policy):
            model = keras.Sequential(
                [
                    keras.Input((4,)),
                    keras.layers.Dense(8, activation="relu"),
                    keras.layers.BatchNormalization(),
                    keras.layers.Softmax(),
                    keras.layers.Dense(3),
                    float32_output.float32_output("softmax"),
                ]
            )
        expected[policy] = model.predict(x, verbose=0)
        model.save(tmp_path / f"{policy}.keras")
    processes.python(
        "-c", LOAD_WITHOUT_TFMIX, *expected, cwd=tmp_path, check=True
    )
    for policy, values in expected.items():
        loaded = np.load(tmp_path / f"{policy}.npy")
        np.testing.assert_array_equal(loaded, values)
