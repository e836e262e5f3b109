"""A confidently wrong sample has a gradient, whichever layer is the last."""

import keras
import numpy as np
import pytest
from keras import layers

import tfmix
from tests import helpers, steps
from tfmix.ops import tensors

POLICIES = ("mixed_float16", "mixed_bfloat16")
X, LABEL = np.ones((1, 1), "float32"), np.array([1])
# These give logits of 36 and -36 where the second is right. The loss is their
# gap, and its gradient by the logits is 1 and -1.
KERNEL = np.array([[36.0, -36.0]], "float32")
LOSS = 72.0
MOVED = np.array([[-0.01, 0.01]], "float32")
CROSS_ENTROPY = "sparse_categorical_crossentropy"


def dense(**arguments):
    return layers.Dense(2, use_bias=False, **arguments)


def chain(*row):
    return keras.Sequential([keras.Input((1,)), *row])


def op():
    inputs = keras.Input((1,))
    return keras.Model(inputs, keras.ops.softmax(dense()(inputs)))


def subclassed():
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.logits = dense()

        def call(self, x):
            return keras.activations.softmax(self.logits(x))

    model = Model()
    model(X)
    return model


def two_results():
    inputs = keras.Input((1,))
    logits = dense()(inputs)
    results = [layers.Softmax(name="a")(logits), layers.Softmax()(logits)]
    return keras.Model(inputs, results)


def float32_output():
    return chain(dense(), tfmix.float32_output("softmax"))


def wide_softmax():
    return chain(dense(), layers.Softmax(dtype="float32"))


HEADS = {
    "float32_output": float32_output,
    "Softmax in float32": wide_softmax,
    "Activation": lambda: chain(dense(), layers.Activation("softmax")),
    "Dense": lambda: chain(dense(activation="softmax")),
    "Dense in float32": lambda: chain(
        dense(activation="softmax", dtype="float32")
    ),
    "op": op,
    "subclassed": subclassed,
}


def in_scope(make, policy):
    with tfmix.policy_scope(policy):
        model = make()
    model.set_weights([KERNEL])
    return model


def compiled(model, rate=0.01, loss=CROSS_ENTROPY, **settings):
    model.compile(keras.optimizers.SGD(rate), loss, **settings)
    return model


def assert_learns(model, y=LABEL):
    """Fails unless a step has the loss of the logits and moves the kernel."""
    before = model.get_weights()[0]
    assert model.train_on_batch(X, y) == pytest.approx(LOSS, abs=1e-3)
    moved = model.get_weights()[0] - before
    np.testing.assert_allclose(moved, MOVED, rtol=1e-3)


@pytest.mark.parametrize("mode", steps.MODES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("head", HEADS)
def test_the_loss_is_that_of_the_logits(head, policy, mode):
    model = in_scope(HEADS[head], policy)
    assert_learns(compiled(model, **steps.settings(mode)))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("activation", "loss", "y", "kernel"),
    [
        ("softmax", "categorical_crossentropy", [[0.0, 1.0]], KERNEL),
        # One logit of 72 has target 0, and one of -72 has target 1.
        ("sigmoid", "binary_crossentropy", [[0.0, 1.0]], 2 * KERNEL),
    ],
)
def test_the_other_cross_entropies_are_computed_from_logits(
    activation, loss, y, kernel, policy
):
    with tfmix.policy_scope(policy):
        model = chain(dense(activation=activation))
    model.set_weights([kernel])
    # The mean over two sigmoids halves the gradient of each.
    rate = 0.02 if activation == "sigmoid" else 0.01
    assert_learns(compiled(model, rate, loss), np.array(y))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", [steps.MODES[0], steps.MODES[-1]])
@pytest.mark.parametrize("head", ["Softmax in float32", "Dense", "subclassed"])
def test_your_own_loop_computes_it_from_logits(head, policy, mode):
    model = in_scope(HEADS[head], policy)
    loss_of = keras.losses.SparseCategoricalCrossentropy()

    def by_jax(kernel):
        return helpers.with_gradients(
            lambda w: loss_of(LABEL, model.stateless_call([w], [], X)[0]),
            kernel,
        )

    def by_tensorflow(_):
        import tensorflow as tf

        with tf.GradientTape() as tape:
            value = loss_of(LABEL, model(X))
        return value, tape.gradient(value, model.trainable_variables)[0]

    step = steps.compiled(by_jax if helpers.ON_JAX else by_tensorflow, mode)
    loss, gradient = step(model.trainable_variables[0].value)
    assert float(loss) == pytest.approx(LOSS, abs=1e-3)
    np.testing.assert_allclose(-0.01 * np.asarray(gradient), MOVED, rtol=1e-3)


def test_each_of_several_results_has_its_own_logits():
    model = in_scope(two_results, "mixed_float16")
    compiled(model, 0.005, [CROSS_ENTROPY] * 2)
    before = model.get_weights()[0]
    losses = model.train_on_batch(X, [LABEL, LABEL])
    np.testing.assert_allclose(losses, [2 * LOSS, LOSS, LOSS], rtol=1e-5)
    moved = model.get_weights()[0] - before
    np.testing.assert_allclose(moved, MOVED, rtol=1e-3)


# Keras's TensorFlow takes any axis.
@helpers.requires_backend("jax")
@pytest.mark.parametrize("axis", [1, -2, 2, -1])
def test_a_loss_only_takes_logits_of_its_own_axis(axis):
    logits = np.array([[[9.0, 0.0], [0.0, 9.0]]], "float32")
    y = np.array([[[0.0, 1.0], [0.0, 1.0]]], "float32")
    values = []
    for policy in ("float32", "mixed_float16"):
        with tfmix.policy_scope(policy):
            probabilities = layers.Softmax(axis, dtype="float32")(logits)
            loss = keras.losses.CategoricalCrossentropy(axis=1)
            values.append(float(loss(y, probabilities)))
    np.testing.assert_allclose(*values, rtol=1e-5)
    noted = tensors.note(probabilities, tensors.LOGITS)
    assert list(noted) == [f"softmax along {axis % 3}"]


# Keras's TensorFlow has it in float32.
@helpers.requires_backend("jax")
def test_float32_is_as_in_keras():
    model = compiled(in_scope(wide_softmax, "float32"))
    assert model.train_on_batch(X, LABEL) == pytest.approx(16.118, abs=1e-3)
    assert tensors.note(model(X), tensors.LOGITS) is None


# Keras's TensorFlow backend takes them, even in float32.
@pytest.mark.costly
@helpers.requires_backend("jax")
@pytest.mark.parametrize("policy", [*POLICIES, "float32"])
@pytest.mark.parametrize(
    ("activation", "loss"),
    [
        ("sigmoid", "categorical_crossentropy"),
        ("softmax", "binary_crossentropy"),
    ],
)
def test_a_loss_takes_no_logits_of_another_activation(activation, loss, policy):
    def plain(name):
        return layers.Activation(name, dtype="float32")

    results = []
    for end in (tfmix.float32_output, plain):
        with tfmix.policy_scope(policy):
            model = chain(layers.Dense(3, use_bias=False), end(activation))
        model.set_weights([np.array([[1.0, -0.5, 2.0]])])
        compiled(model, 0.125, loss)
        value = model.train_on_batch(X, np.array([[0.0, 1.0, 0.0]]))
        results.append((value, model.get_weights()[0]))
    (found, updated), (expected, expected_updated) = results
    helpers.assert_close(found, expected, "float32")
    dtype = model.layers[0].compute_dtype
    helpers.assert_close(updated, expected_updated, dtype)
