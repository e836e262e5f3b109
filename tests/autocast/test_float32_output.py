"""`float32_output` keeps loss and gradient of a 16-bit model exact."""

import subprocess
import sys

import keras
import numpy as np
import pytest

from tests import helpers
from tfmix.autocast import float32_output, global_policy

SIXTEEN_BIT = ["mixed_float16", "mixed_bfloat16"]


def logit_gradient(model, x, y):
    """Returns the gradient of the mean cross-entropy by the last bias."""
    loss_of = keras.losses.SparseCategoricalCrossentropy()
    bias = model.layers[-2].bias
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x))
        return float(loss), np.asarray(tape.gradient(loss, bias.value))
    import jax

    values = [variable.value for variable in model.trainable_variables]
    index = [v is bias for v in model.trainable_variables].index(True)

    def scalar(weights):
        outputs, _ = model.stateless_call(
            weights, [v.value for v in model.non_trainable_variables], x
        )
        return loss_of(y, outputs)

    loss, gradients = jax.value_and_grad(scalar)(values)
    return float(loss), np.asarray(gradients[index])


def classifier(classes, kernel, bias):
    model = keras.Sequential(
        [
            keras.Input((kernel.shape[0],)),
            keras.layers.Dense(classes),
            float32_output.float32_output("softmax"),
        ]
    )
    model.layers[0].set_weights([kernel, bias])
    return model


@pytest.mark.parametrize("policy", SIXTEEN_BIT)
def test_it_is_a_plain_float32_activation_under_every_policy(policy):
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


@pytest.mark.costly
@helpers.requires_backend("jax")
@pytest.mark.parametrize("policy", [*SIXTEEN_BIT, "float32"])
@pytest.mark.parametrize(
    ("activation", "loss"),
    [
        ("sigmoid", "categorical_crossentropy"),
        ("softmax", "binary_crossentropy"),
    ],
)
def test_a_loss_takes_no_logits_of_another_activation(activation, loss, policy):
    # Keras's TensorFlow backend does, even in float32.
    kernel, x = np.array([[1.0, -0.5, 2.0]]), np.ones((1, 1))
    results = []
    for make in (float32_output.float32_output, plain_output):
        with global_policy.policy_scope(policy):
            dense = keras.layers.Dense(3, use_bias=False)
            model = keras.Sequential(
                [keras.Input((1,)), dense, make(activation)]
            )
        model.set_weights([kernel])
        model.compile(keras.optimizers.SGD(0.125), loss)
        results.append(model.train_on_batch(x, np.array([[0.0, 1.0, 0.0]])))
        results.append(model.get_weights()[0])
    found, updated, expected, expected_updated = results
    helpers.assert_close(found, expected, "float32")
    helpers.assert_close(updated, expected_updated, dense.compute_dtype)


def plain_output(activation):
    return keras.layers.Activation(activation, dtype="float32")


@pytest.mark.costly
@pytest.mark.parametrize("policy", SIXTEEN_BIT)
def test_50000_classes_have_the_loss_and_gradient_of_float32(policy):
    generator = np.random.default_rng(7)
    classes, features, samples = 50_000, 16, 8
    # Values both formats hold, so that only the head's arithmetic differs.
    kernel = generator.integers(-8, 9, (features, classes)) / 16
    x = generator.integers(-4, 5, (samples, features)) / 4
    y = generator.integers(0, classes, samples)
    results = []
    for name in ("float32", policy):
        with global_policy.policy_scope(name):
            model = classifier(classes, kernel, np.zeros(classes))
        results.append(logit_gradient(model, x, y))
    (loss, gradient), (loss_16, gradient_16) = results
    bound = 1e-3
    assert loss_16 == pytest.approx(loss, rel=bound)
    error = np.linalg.norm(gradient_16 - gradient) / np.linalg.norm(gradient)
    assert error < bound


@pytest.mark.parametrize(
    ("activation", "error", "message"),
    [
        ("sofmax", ValueError, "Did you mean 'softmax'"),
        ("gleu", ValueError, "Did you mean 'gelu'"),
        # `get` is a function of that module, but no activation.
        ("gett", ValueError, r"activation='gett'\.$"),
        (3, TypeError, "activation=3 of type int"),
        (keras.layers.Softmax(), TypeError, 'dtype="float32"'),
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
    subprocess.run(
        [sys.executable, "-c", LOAD_WITHOUT_TFMIX, *expected],
        check=True,
        cwd=tmp_path,
    )
    for policy, values in expected.items():
        loaded = np.load(tmp_path / f"{policy}.npy")
        np.testing.assert_array_equal(loaded, values)
