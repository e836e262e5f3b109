"""Under JAX, `evaluate` and `predict` trace what Keras's policy traces."""

import keras
import numpy as np
import pytest
from keras import layers

import tfmix
from tests import helpers

pytestmark = helpers.requires_backend("jax")

if keras.backend.backend() == "jax":
    import jax

    from tfmix._keras import tapes

X = np.random.default_rng(0).normal(size=(32, 8)).astype("float32")
Y = X[:, :1]
# Gradients of this factor are lost in float16 unless gates scale them.
FACTOR = 1e-6


class Curious(keras.Model):
    """Notes in each step, and in what it differentiates, who may ask."""

    def __init__(self):
        super().__init__()
        self.dense, self.head = layers.Dense(16, "tanh"), layers.Dense(1)
        self.asked, self.slopes = [], []

    def call(self, x):
        self.asked.append(tapes.may_be_asked())
        return self.head(self.dense(x))


class Attacked(Curious):
    """Takes gradients of its inputs in a step of `evaluate`."""

    transform = staticmethod(lambda function: function)

    def test_step(self, state, data):
        x, _ = data
        trained, others, _ = state

        def loss(x):
            y, _ = self.stateless_call(trained, others, x)
            return FACTOR * keras.ops.sum(y)

        slope = jax.grad(self.transform(loss))(x)
        jax.debug.callback(self.slopes.append, slope)
        return super().test_step(state, data)


def compiled(kind, policy="mixed_float16", **kwargs):
    tfmix.set_global_policy(policy)
    keras.utils.set_random_seed(0)
    model = kind()
    model.compile("adam", "mse", **kwargs)
    model.predict(X[:1], verbose=0)
    model.asked.clear()
    return model


@pytest.mark.parametrize(
    "jit_compile", [True, pytest.param(False, marks=pytest.mark.slow)]
)
def test_only_training_asks_for_gradients(jit_compile):
    model = compiled(Curious, jit_compile=jit_compile)
    # The first trace of each step only finds shapes.
    model.predict(X, verbose=0)
    assert not model.asked[-1]
    model.evaluate(X, Y, verbose=0)
    assert not model.asked[-1]
    model.asked.clear()
    model.fit(X, Y, validation_data=(X, Y), verbose=0)
    assert any(model.asked)


@pytest.mark.parametrize("transform", [lambda f: f, lambda f: jax.jit(f)])
def test_gradients_inside_a_step_of_evaluate_are_those_of_float32(transform):
    slopes = {}
    for policy in ("float32", "mixed_float16"):
        model = compiled(Attacked, policy)
        model.transform = transform
        model.evaluate(X, Y, batch_size=32, verbose=0)
        jax.effects_barrier()
        (slopes[policy],) = model.slopes
    np.testing.assert_allclose(
        slopes["mixed_float16"], slopes["float32"], rtol=0.02, atol=1e-9
    )


def test_gradients_of_a_whole_test_step_are_those_of_float32():
    found = {}
    for policy in ("float32", "mixed_float16"):
        model = compiled(Curious, policy)
        model.evaluate(X, Y, verbose=0)
        values = model._get_jax_state(
            trainable_variables=True,
            non_trainable_variables=True,
            metrics_variables=True,
        )

        def loss(x, model=model, values=values):
            return FACTOR * model.test_step(values, (x, Y))[0]["loss"]

        found[policy] = jax.grad(jax.jit(loss))(X)
    np.testing.assert_allclose(
        found["mixed_float16"], found["float32"], rtol=0.02, atol=1e-10
    )


@pytest.mark.parametrize("factor", [1e-9, 1e6])
def test_gradients_of_a_step_in_a_callback_are_those_of_float32(factor):
    found = {}

    class Saliency(keras.callbacks.Callback):
        def on_predict_batch_end(self, batch, logs=None):
            trained = [v.value for v in self.model.trainable_variables]

            def loss(x):
                results, _ = self.model.predict_step((trained, []), (x,))
                return factor * keras.ops.sum(results)

            found[policy] = jax.grad(loss)(X)

    for policy in ("float32", "mixed_float16"):
        compiled(Curious, policy).predict(
            X, batch_size=32, verbose=0, callbacks=[Saliency()]
        )
    np.testing.assert_allclose(
        found["mixed_float16"], found["float32"], rtol=0.02, atol=1e-2 * factor
    )
