"""A confidently wrong sample has a gradient, whichever layer is the last."""

import functools

import keras
import numpy as np
import pytest
from keras import layers

import tfmix
from tfmix._keras import global_state

ON_JAX = keras.backend.backend() == "jax"
POLICIES = ("mixed_float16", "mixed_bfloat16")
X, LABEL = np.ones((1, 1), "float32"), np.array([1])
# These give logits of 36 and -36 where the second is right. The loss is their
# gap, and its gradient by the logits is 1 and -1.
KERNEL = np.array([[36.0, -36.0]], "float32")
LOSS = 72.0
MOVED = np.array([[-0.01, 0.01]], "float32")
PARAMETERS = {
    "eager": {"run_eagerly": True},
    "graph": {"jit_compile": False},
    "xla": {"jit_compile": True},
}
# JAX has no graph without XLA, and eager mode covers that.
MODES = ("eager", "xla") if ON_JAX else ("eager", "graph", "xla")


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


def nested():
    inputs = keras.Input((1,))
    head = keras.Sequential([keras.Input((2,)), layers.Softmax()])
    return keras.Model(inputs, head(dense()(inputs)))


def two_results():
    inputs = keras.Input((1,))
    logits = dense()(inputs)
    results = [layers.Softmax(name="a")(logits), layers.Softmax()(logits)]
    return keras.Model(inputs, results)


def cloned():
    return keras.models.clone_model(float32_output())


def from_json():
    return keras.models.model_from_json(float32_output().to_json())


def float32_output():
    return chain(dense(), tfmix.float32_output("softmax"))


HEADS = {
    "float32_output": float32_output,
    "cloned": cloned,
    "from_json": from_json,
    "Activation in float32": lambda: chain(
        dense(), layers.Activation("softmax", dtype="float32")
    ),
    "Softmax in float32": lambda: chain(
        dense(), layers.Softmax(dtype="float32")
    ),
    "Activation": lambda: chain(dense(), layers.Activation("softmax")),
    "Softmax": lambda: chain(dense(), layers.Softmax()),
    "Dense": lambda: chain(dense(activation="softmax")),
    "Dense in float32": lambda: chain(
        dense(activation="softmax", dtype="float32")
    ),
    "op": op,
    "subclassed": subclassed,
    "nested": nested,
}


def made(head, policy):
    with tfmix.policy_scope(policy):
        model = HEADS[head]()
    model.set_weights([KERNEL])
    return model


def assert_learns(model, loss="sparse_categorical_crossentropy", y=LABEL):
    """Fails unless a step has the loss of the logits and moves the kernel."""
    before = model.get_weights()[0]
    assert model.train_on_batch(X, y) == pytest.approx(LOSS, abs=1e-3)
    moved = model.get_weights()[0] - before
    np.testing.assert_allclose(moved, MOVED, rtol=1e-3)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("head", HEADS)
def test_the_loss_is_that_of_the_logits(head, policy, mode):
    model = made(head, policy)
    sgd = keras.optimizers.SGD(0.01)
    loss = "sparse_categorical_crossentropy"
    model.compile(sgd, loss, **PARAMETERS[mode])
    assert_learns(model)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_loaded_model_has_it(policy, is_compiled, tmp_path):
    model = made("float32_output", policy)
    compile = functools.partial(
        keras.Model.compile,
        optimizer=keras.optimizers.SGD(0.01),
        loss="sparse_categorical_crossentropy",
    )
    if is_compiled:
        compile(model)
    model.save(tmp_path / "model.keras")
    model = keras.models.load_model(tmp_path / "model.keras")
    if not is_compiled:
        compile(model)
    assert_learns(model)


@pytest.mark.parametrize("how", ["apply_policy", "convert_model"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_converted_model_has_it(policy, how):
    model = made("Softmax in float32", "float32")
    sgd = keras.optimizers.SGD(0.01)
    model.compile(sgd, "sparse_categorical_crossentropy")
    if how == "apply_policy":
        report = tfmix.apply_policy(model, policy)
        assert_learns(model)
        report.undo()
    else:
        assert_learns(tfmix.convert_model(model, policy))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("activation", "loss", "y", "kernel"),
    [
        ("softmax", "categorical_crossentropy", [[0.0, 1.0]], KERNEL),
        # One logit of 72 has target 0, and one of -72 has target 1.
        ("sigmoid", "binary_crossentropy", [[0.0, 1.0]], 2 * KERNEL),
    ],
)
def test_the_other_cross_entropies_have_it(activation, loss, y, kernel, policy):
    with tfmix.policy_scope(policy):
        model = chain(dense(activation=activation))
    model.set_weights([kernel])
    # The mean over two sigmoids halves the gradient of each.
    rate = 0.02 if activation == "sigmoid" else 0.01
    model.compile(keras.optimizers.SGD(rate), loss)
    assert_learns(model, loss, np.array(y))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("head", ["Softmax in float32", "Dense", "subclassed"])
def test_your_own_loop_has_it(head, policy, is_compiled):
    model = made(head, policy)
    loss_of = keras.losses.SparseCategoricalCrossentropy()
    if ON_JAX:
        import jax

        def slope(weights):
            value, gradients = jax.value_and_grad(of_weights)(weights)
            return value, gradients[0]

        def of_weights(weights):
            outputs, _ = model.stateless_call(weights, [], X)
            return loss_of(LABEL, outputs)

        slope = jax.jit(slope) if is_compiled else slope
        loss, gradient = slope([v.value for v in model.trainable_variables])
    else:
        import tensorflow as tf

        def slope():
            with tf.GradientTape() as tape:
                value = loss_of(LABEL, model(X))
            return value, tape.gradient(value, model.trainable_variables)[0]

        slope = tf.function(slope, jit_compile=True) if is_compiled else slope
        loss, gradient = slope()
    assert float(loss) == pytest.approx(LOSS, abs=1e-3)
    np.testing.assert_allclose(-0.01 * np.asarray(gradient), MOVED, rtol=1e-3)


def test_each_of_several_results_has_its_own():
    with tfmix.policy_scope("mixed_float16"):
        model = two_results()
    model.set_weights([KERNEL])
    loss = "sparse_categorical_crossentropy"
    model.compile(keras.optimizers.SGD(0.005), [loss, loss])
    before = model.get_weights()[0]
    losses = model.train_on_batch(X, [LABEL, LABEL])
    np.testing.assert_allclose(losses, [2 * LOSS, LOSS, LOSS], rtol=1e-5)
    moved = model.get_weights()[0] - before
    np.testing.assert_allclose(moved, MOVED, rtol=1e-3)


@pytest.mark.skipif(not ON_JAX, reason="Keras's TensorFlow takes any axis")
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
    noted = global_state.note(probabilities, global_state.LOGITS)
    assert list(noted) == [f"softmax along {axis % 3}"]


@pytest.mark.skipif(not ON_JAX, reason="Keras's TensorFlow has it in float32")
def test_float32_is_as_in_keras():
    model = made("Softmax in float32", "float32")
    sgd = keras.optimizers.SGD(0.01)
    model.compile(sgd, "sparse_categorical_crossentropy")
    assert model.train_on_batch(X, LABEL) == pytest.approx(16.118, abs=1e-3)
    assert global_state.note(model(X), global_state.LOGITS) is None
