"""The gates of a model change nothing but its gradients."""

import functools
import gc
import types
import weakref

import keras
import numpy as np
import pytest

import tfmix
from tests import helpers, loops, steps

X = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")


@pytest.fixture(autouse=True)
def float16():
    tfmix.set_global_policy("mixed_float16")


def dense(*sizes):
    layers = [keras.layers.Dense(size) for size in sizes]
    model = keras.Sequential([keras.Input((4,)), *layers])
    return model


def called(model, x):
    """Calls a model where a caller may ask for gradients."""
    if not helpers.ON_JAX:
        import tensorflow as tf

        with tf.GradientTape():
            return model(x)
    import jax

    frozen = [v.value for v in model.non_trainable_variables]
    weights = [v.value for v in model.trainable_variables]
    return jax.vjp(lambda w: model.stateless_call(w, frozen, x)[0], weights)[0]


def of_ids():
    table = keras.layers.Embedding(3000, 4, mask_zero=True)
    layers = [keras.Input((2,), dtype="int32"), table, keras.layers.LSTM(3)]
    return keras.Sequential(layers)


# Keras 3.16 warns of it in float32, too.
@pytest.mark.costly
@pytest.mark.filterwarnings("ignore:.*does not support masking")
@pytest.mark.parametrize(
    ("make", "x"),
    # 2049 is 2048 in float16, and 0 is masked.
    [(lambda: dense(8, 2), X), (of_ids, np.int32([[2049, 0], [3, 4]]))],
    ids=["numbers", "ids"],
)
def test_results_are_the_same_bits(make, x):
    model = make()
    found = called(model, x)
    with helpers.without_gates():
        helpers.assert_same_bits(found, called(model, x))
    assert keras.backend.standardize_dtype(found.dtype) == "float32"


def in_a_branch(model, x):
    import tensorflow as tf

    return tf.cond(x[0, 0] < 9.0, lambda: model(x), lambda: model(-x))


def in_a_loop(model, x):
    import tensorflow as tf

    def add(i, total):
        return i + 1, total + model(x)

    start = tf.constant(0), tf.zeros((len(X), 2))
    return tf.while_loop(lambda *_: True, add, start, maximum_iterations=3)[1]


@pytest.mark.costly
@helpers.requires_backend("tensorflow")
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("call", [in_a_branch, in_a_loop])
def test_gradients_go_through_control_flow(call, jit):
    import tensorflow as tf

    model = dense(8, 2)

    def slopes():
        x = tf.constant(X)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(call(model, x)) * 1e-6
        return tape.gradient(loss, model.trainable_variables[:2])

    found = tf.function(slopes, jit_compile=jit)()
    expected = slopes()
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-10)


@pytest.mark.costly
@helpers.requires_backend("tensorflow")
@pytest.mark.parametrize("mode", ["eager", "graph", "jit"])
def test_statistics_are_updated_once_and_losses_added_once(mode):
    import tensorflow as tf

    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(3, activity_regularizer="l2"),
            keras.layers.BatchNormalization(momentum=0.5),
        ]
    )
    twin = keras.models.clone_model(model)
    twin.set_weights(model.get_weights())

    def penalised():
        # Second order runs the model once more.
        x = tf.constant(X)
        with tf.GradientTape() as outer:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = model(x, training=True)
            slope = tape.gradient(y, x)
            loss = tf.reduce_sum(slope**2) + tf.reduce_sum(y)
        outer.gradient(loss, model.trainable_variables)
        return len(model.losses)

    run = penalised
    if mode != "eager":
        run = tf.function(penalised, jit_compile=mode == "jit")
    assert int(run()) == 1
    with helpers.without_gates():
        twin(X, training=True)
    for one, other in zip(model.get_weights(), twin.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


@helpers.requires_backend("tensorflow")
@pytest.mark.parametrize("graph", [False, True])
def test_forward_mode_runs_as_in_float32(graph):
    import tensorflow as tf

    model = dense(8, 1)

    def slope():
        x = tf.constant(X)
        ones = tf.ones_like(x)
        with tf.autodiff.ForwardAccumulator(x, ones) as forward:
            y = model(x)
        return forward.jvp(y)

    found = (tf.function(slope) if graph else slope)()
    first, second = model.trainable_variables[0], model.trainable_variables[2]
    exact = np.ones_like(X) @ first.numpy() @ second.numpy()
    np.testing.assert_allclose(found, exact, rtol=0.01, atol=1e-3)


def test_a_plain_graph_around_a_model_does_not_hide_it():
    inner = dense(8, 1)
    tfmix.set_global_policy("float32")
    x = keras.Input((4,))
    outer = keras.Model(x, inner(x))
    result = outer(X)
    assert keras.backend.standardize_dtype(result.dtype) == "float32"


@pytest.mark.every_case("each is another way in which data can be bad")
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("where", ["x", "y", "loss"])
def test_bad_data_does_not_move_the_place(where, bad):
    model, data = dense(1), {"x": X.copy(), "y": X[:, :1].copy()}
    factor = bad if where == "loss" else 1.0
    model.compile("sgd", lambda y, found: factor * (found - y) ** 2)
    if where != "loss":
        data[where][:] = bad
    before = model.get_weights()
    model.fit(**data, batch_size=4, verbose=0)
    assert model.optimizer.skipped_steps == 2
    assert model.optimizer.loss_scale == 2.0**15
    for one, other in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)


def fitted(model):
    model.compile("sgd", "mse")
    model.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0)
    model.evaluate(np.ones((4, 3)), np.ones((4, 1)), verbose=0)


def called_under_a_tape_that_is_not_asked(model):
    import tensorflow as tf

    @tf.function
    def called(x):
        with tf.GradientTape():
            return model(x)

    called(tf.ones((4, 3)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "use",
    [
        fitted,
        pytest.param(
            called_under_a_tape_that_is_not_asked,
            marks=helpers.requires_backend("tensorflow"),
        ),
    ],
)
def test_an_unreferenced_model_is_freed(use):
    def used():
        with tfmix.policy_scope("mixed_float16"):
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        use(model)
        return weakref.ref(model)

    model = used()
    keras.utils.clear_session()
    gc.collect()
    assert model() is None


@pytest.fixture
def garbage():
    """Lists what is freed only as part of a cycle, once it is asked for."""

    def found():
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        return gc.garbage

    gc.collect()
    gc.disable()
    yield found
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


class KeepsScores(keras.layers.Layer):
    """Keeps a tensor, and adds a loss."""

    def call(self, x):
        self.scores = x * 2
        self.add_loss(keras.ops.mean(self.scores))
        return self.scores


@pytest.mark.costly
@pytest.mark.parametrize("way", ["fit", "loop"])
def test_an_eager_step_leaves_nothing_to_the_garbage_collector(way, garbage):
    model = dense(3, 1)
    model.add(KeepsScores())
    optimizer = tfmix.LossScaleOptimizer(keras.optimizers.SGD())
    y = keras.ops.ones((8, 1))
    if way == "fit":
        model.compile(optimizer, "mse", run_eagerly=True, jit_compile=False)
        step = functools.partial(model.fit, X, y, verbose=0)
    else:
        loop = loops.Loop(model, optimizer, "eager")
        step = functools.partial(loop.step, X, y)
    for _ in range(2):
        step()
    gc.collect()
    step()
    tensor = type(y)
    ours = [
        one
        for one in garbage()
        for kind in [one if isinstance(one, types.FunctionType) else type(one)]
        if kind is tensor or kind.__module__.startswith("tfmix")
    ]
    assert not ours


class Codes(keras.Model):
    """Returns whole numbers for whole numbers, from a table or a class."""

    def __init__(self, has_weights):
        super().__init__()
        self.has_weights = has_weights
        if has_weights:
            self.layer = keras.layers.Embedding(10, 4)
        else:
            self.layer = keras.layers.IntegerLookup(vocabulary=[5, 7, 9])

    def call(self, ids):
        codes = self.layer(ids)
        return keras.ops.argmax(codes, -1) if self.has_weights else codes


@pytest.mark.parametrize("has_weights", [True, False])
def test_a_model_without_any_float_outside_it_runs(has_weights):
    if helpers.ON_JAX and not has_weights:
        pytest.skip("IntegerLookup under JAX runs outside of compiled code")
    ids = np.array([[5, 7, 9]])
    model = Codes(has_weights)
    expected = np.asarray(model(ids))
    run = steps.compiled(model, steps.MODES[1])
    for found in (run(keras.ops.convert_to_tensor(ids)), model.predict(ids)):
        np.testing.assert_array_equal(np.asarray(found), expected)


class Remembers(keras.layers.Layer):
    """Adds the first of what its last call has left."""

    def __init__(self, container):
        super().__init__()
        self.container, self.left = container, None
        self.inner = keras.layers.Dense(4)

    def call(self, x):
        found = self.inner(x)
        added = found if self.left is None else found + self.left[0]
        self.left = self.container([found, found])
        return added


@helpers.requires_backend("tensorflow")
@pytest.mark.parametrize("container", [list, tuple])
def test_gradients_reach_what_an_earlier_call_left_in_a_container(container):
    import tensorflow as tf

    def slopes(policy):
        tfmix.set_global_policy(policy)
        keras.utils.set_random_seed(0)
        memory = Remembers(container)
        model = keras.Sequential([keras.Input((4,)), memory])
        model.add(keras.layers.Dense(1))
        memory.left = None  # Keras has called it with symbols.
        with tf.GradientTape() as tape:
            model(X)
            loss = tf.reduce_sum(model(2 * X) ** 2)
        return tape.gradient(loss, model.trainable_variables)

    for right, found in zip(
        slopes("float32"), slopes("mixed_float16"), strict=True
    ):
        np.testing.assert_allclose(found, right, rtol=0.01, atol=0.02)
