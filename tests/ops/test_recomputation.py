"""Code that runs again in the backward pass computes as it did before."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfmix
from tests import helpers, steps

if not helpers.ON_JAX:
    import tensorflow as tf
    from tensorflow import recompute_grad as IMPORTED_BEFORE
RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 8)).astype("float32")
Y = np.full((16, 1), 0.3, "float32")


class Recomputes(layers.Layer):
    """Multiplies by a weight in a way that computes the product again."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1], 8))
        self.product = keras.remat(lambda x: ops.matmul(x, self.w))

    def call(self, x):
        return self.function(self, x)


class WithALayerInside(Recomputes):
    def build(self, shape):
        super().build(shape)
        self.inner = layers.Dense(8)
        self.inner.build((None, 8))


def by_keras(layer, x):
    return keras.remat(lambda t: ops.matmul(t, layer.w))(x)


def by_what_build_made(layer, x):
    return layer.product(x)


def by_an_op_under_a_rule(layer, x):
    return keras.remat(lambda t: ops.softmax(ops.matmul(t, layer.w)))(x)


def by_a_layer_inside(layer, x):
    return keras.remat(lambda t: layer.inner(ops.matmul(t, layer.w)))(x)


def by_tensorflow(layer, x):
    return tf.recompute_grad(lambda t: t @ layer.w)(x)


def by_a_function_imported_before(layer, x):
    return IMPORTED_BEFORE(lambda t: t @ layer.w)(x)


def by_a_tape_in_its_gradient(layer, x):
    """Does by hand what `tf.recompute_grad` does."""

    @tf.custom_gradient
    def product(x):
        def gradient(upstream, variables=()):
            with tf.GradientTape() as tape:
                tape.watch(x)
                again = x @ layer.w
            found = tape.gradient(again, [x, *variables], upstream)
            return found[0], found[1:]

        return x @ layer.w, gradient

    return product(x)


def by_a_weight_in_its_gradient(layer, x):
    @ops.custom_gradient
    def identity(x):
        def gradient(*results, upstream=None):
            # Keras's backends call it differently.
            upstream = results[0] if upstream is None else upstream
            return upstream + ops.matmul(upstream, 0 * layer.w)

        return x + 0, gradient

    return identity(ops.matmul(x, layer.w))


OWN = [by_keras, by_what_build_made, by_an_op_under_a_rule, by_a_layer_inside]
if not helpers.ON_JAX:
    OWN += [by_tensorflow, by_a_function_imported_before]
    # JAX refuses a weight that a gradient closes over, even in float32.
    OWN += [by_a_tape_in_its_gradient, by_a_weight_in_its_gradient]


def own(function):
    inside = function is by_a_layer_inside
    return lambda: (WithALayerInside if inside else Recomputes)(function)


def model_of(make):
    keras.utils.set_random_seed(0)
    last = layers.Dense(1, dtype="float32")
    return keras.Sequential([keras.Input((8,)), make(), last])


def losses(model, mode):
    sgd = keras.optimizers.SGD(0.1)
    model.compile(sgd, "mse", **steps.settings(mode))
    return model.fit(X, Y, 16, 4, verbose=0, shuffle=False).history["loss"]


@pytest.mark.costly
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("mode", steps.MODES)
@pytest.mark.parametrize("function", OWN)
def test_a_layer_that_recomputes_trains_as_in_float32(function, mode, policy):
    make = own(function)
    exact = losses(model_of(make), mode)
    tfmix.set_global_policy(policy)
    found = losses(model_of(make), mode)
    within = 0.005 if policy == "mixed_float16" else 0.04
    np.testing.assert_allclose(found, exact, rtol=within)
    assert exact[-1] < exact[0] / 2


@pytest.mark.skipif(
    keras.backend.backend() == "jax",
    reason="JAX traces the gradient with the call",
)
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_gradient_after_the_scope_computes_as_the_call_did(mode):
    import tensorflow as tf

    def run(x):
        # The sum of the exponentials is beyond float16.
        function = keras.remat(lambda x: ops.log(ops.sum(ops.exp(x))))
        with tf.GradientTape() as tape:
            tape.watch(x)
            with tfmix.policy_scope("mixed_float16"):
                y = function(x)
        return tape.gradient(y, x)

    if mode == "graph":
        run = tf.function(run)
    found = run(tf.fill([100], tf.constant(11.0, tf.float16)))
    np.testing.assert_allclose(found, np.full(100, 0.01), rtol=0.01)
