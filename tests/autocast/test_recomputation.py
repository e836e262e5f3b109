"""Code that runs again in the backward pass computes as it did before."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfmix

ON_JAX = keras.backend.backend() == "jax"
if not ON_JAX:
    from tensorflow import recompute_grad as IMPORTED_BEFORE
MODES = ["eager", "jit"] if ON_JAX else ["eager", "graph", "jit"]
RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 8)).astype("float32")
Y = np.full((16, 1), 0.3, "float32")


class Recomputes(layers.Layer):
    """Has a weight, and a function wrapped once."""

    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1], 8))
        self.product = keras.remat(lambda x: ops.matmul(x, self.w))


class ByTensorFlow(Recomputes):
    def call(self, x):
        import tensorflow as tf

        return tf.recompute_grad(lambda t: t @ self.w)(x)


class ByKeras(Recomputes):
    def call(self, x):
        return keras.remat(lambda t: ops.matmul(t, self.w))(x)


class ByWhatBuildMade(Recomputes):
    def call(self, x):
        return self.product(x)


class ByAnOpUnderARule(Recomputes):
    def call(self, x):
        return keras.remat(lambda t: ops.softmax(ops.matmul(t, self.w)))(x)


class ByALayerInside(Recomputes):
    def build(self, shape):
        super().build(shape)
        self.inner = layers.Dense(8)
        self.inner.build((None, 8))

    def call(self, x):
        return keras.remat(lambda t: self.inner(ops.matmul(t, self.w)))(x)


class ByAFunctionImportedBefore(Recomputes):
    def call(self, x):
        return IMPORTED_BEFORE(lambda t: t @ self.w)(x)


class ByATapeInItsGradient(Recomputes):
    """Does by hand what `tf.recompute_grad` does."""

    def call(self, x):
        import tensorflow as tf

        @tf.custom_gradient
        def product(x):
            def gradient(upstream, variables=()):
                with tf.GradientTape() as tape:
                    tape.watch(x)
                    again = x @ self.w
                found = tape.gradient(again, [x, *variables], upstream)
                return found[0], found[1:]

            return x @ self.w, gradient

        return product(x)


class ByAWeightInItsGradient(Recomputes):
    def call(self, x):
        @ops.custom_gradient
        def identity(x):
            def gradient(*results, upstream=None):
                # Keras's backends call it differently.
                upstream = results[0] if upstream is None else upstream
                return upstream + ops.matmul(upstream, 0 * self.w)

            return x + 0, gradient

        return identity(ops.matmul(x, self.w))


class Residual(layers.Layer):
    def build(self, shape):
        self.dense, self.norm = layers.Dense(8), layers.LayerNormalization()
        self.dense.build(shape)
        self.norm.build(shape)

    def call(self, x, training=None):
        return self.norm(self.dense(x) + x)


OWN = {
    made.__name__: made
    for made in (
        ByKeras,
        ByWhatBuildMade,
        ByAnOpUnderARule,
        ByALayerInside,
        # JAX refuses a weight that a gradient closes over, even in float32.
        *([] if ON_JAX else [ByAWeightInItsGradient]),
        *([] if ON_JAX else [ByTensorFlow, ByAFunctionImportedBefore]),
        *([] if ON_JAX else [ByATapeInItsGradient]),
    )
}
SCOPES = {
    "full": keras.RematScope("full"),
    "activations": keras.RematScope("activations"),
    "larger_than": keras.RematScope("larger_than", output_size_threshold=4),
    "list_of_layers": keras.RematScope("list_of_layers", layer_names=["it"]),
}
IN_SCOPE = {
    "dense": lambda: layers.Dense(8, "relu", name="it"),
    "residual": lambda: Residual(name="it"),
}
# Keras cannot compute these, even in float32.
REFUSED_BY_KERAS = {
    ("full", "graph"),
    ("full", "jit"),
    ("larger_than", "graph"),
    ("larger_than", "jit"),
}


def model_of(make):
    keras.utils.set_random_seed(0)
    last = layers.Dense(1, dtype="float32")
    return keras.Sequential([keras.Input((8,)), make(), last])


def losses(model, mode):
    eager, jit = mode == "eager", mode == "jit"
    model.compile(
        keras.optimizers.SGD(0.1), "mse", run_eagerly=eager, jit_compile=jit
    )
    return model.fit(X, Y, 16, 4, verbose=0, shuffle=False).history["loss"]


def check_as_in_float32(make, mode, policy):
    exact = losses(model_of(make), mode)
    tfmix.set_global_policy(policy)
    found = losses(model_of(make), mode)
    within = 0.005 if policy == "mixed_float16" else 0.04
    np.testing.assert_allclose(found, exact, rtol=within)
    assert exact[-1] < exact[0] / 2


@pytest.mark.costly
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OWN)
def test_a_layer_that_recomputes_trains_as_in_float32(name, mode, policy):
    check_as_in_float32(OWN[name], mode, policy)


@pytest.mark.costly
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("kind", IN_SCOPE)
def test_a_layer_of_a_scope_trains_as_in_float32(kind, scope, mode, policy):
    if not ON_JAX and (scope, mode) in REFUSED_BY_KERAS:
        pytest.skip("Keras refuses it in float32 as well")
    if not ON_JAX and scope == "list_of_layers" and mode != "eager":
        pytest.skip("TensorFlow refuses the keywords of Keras's call")
    if scope == "larger_than" and (kind == "residual" or ON_JAX):
        pytest.skip("Keras cannot tell the size of what it returns")

    def make():
        with SCOPES[scope]:
            return IN_SCOPE[kind]()

    check_as_in_float32(make, mode, policy)


@pytest.mark.costly
@pytest.mark.parametrize("mode", MODES)
def test_a_model_with_its_policy_trains_as_in_float32(mode):
    exact = losses(model_of(ByAnOpUnderARule), mode)
    with tfmix.policy_scope("mixed_float16"):
        model = model_of(ByAnOpUnderARule)
    np.testing.assert_allclose(losses(model, mode), exact, rtol=0.005)


@pytest.mark.skipif(ON_JAX, reason="JAX traces the gradient with the call")
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
