"""Your own training loops, in cases where Keras fails silently."""

import warnings

import keras
import numpy as np
import pytest
from keras import ops

from tests import helpers
from tfmix.loss_scaling import optimizer as optimizers
from tfmix.loss_scaling import rules

Wrapped = optimizers.LossScaleOptimizer


def weight(value=1.0):
    return keras.Variable(np.float32(value), name="weight")


def array(*values):
    return ops.convert_to_tensor(np.asarray(values, "float32"))


def test_forgetting_to_scale_the_loss_warns_once():
    wrapped, w = Wrapped("sgd"), keras.Variable(np.ones(1, "float32"))
    with pytest.warns(UserWarning, match="optimizer.scale_loss"):
        wrapped.apply([array(1.0)], [w])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapped.apply([array(1.0)], [w])


@pytest.mark.parametrize("rule", [rules.NoLossScale(), 1.0])
def test_without_loss_scaling_there_is_nothing_to_forget(rule):
    wrapped = Wrapped("sgd", loss_scale=rule)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapped.apply([array(1.0)], [keras.Variable(np.ones(1, "float32"))])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_sixteen_bit_loss_is_scaled_in_float32(dtype):
    loss = ops.cast(array(3.0)[0], dtype)
    scaled = Wrapped("sgd").scale_loss(loss)
    assert keras.backend.standardize_dtype(scaled.dtype) == "float32"
    assert float(scaled) == 98304.0


def test_several_losses_are_scaled_at_once():
    scaled = Wrapped("sgd", loss_scale=4.0).scale_loss({"a": 1.0, "b": [2.0]})
    assert float(scaled["a"]) == 4.0
    assert float(scaled["b"][0]) == 8.0


def test_unscaled_gradients_are_not_divided_again():
    wrapped = Wrapped(keras.optimizers.SGD(1.0), loss_scale=8.0)
    w = keras.Variable(np.zeros(1, "float32"))
    wrapped.build([w])
    helpers.takes_scaled_gradients(wrapped)
    grads = wrapped.unscale_gradients([array(16.0)])
    assert float(grads[0][0]) == 2.0
    wrapped.apply([ops.minimum(grads[0], 1.5)], [w], unscaled=True)
    assert float(w.numpy()[0]) == -1.5
    wrapped.apply([array(8.0)], [w])
    assert float(w.numpy()[0]) == -2.5


def test_clipping_by_value_does_not_hide_an_infinity():
    wrapped = Wrapped(keras.optimizers.SGD(1.0), loss_scale=8.0)
    w = keras.Variable(np.zeros(1, "float32"))
    wrapped.build([w])
    helpers.takes_scaled_gradients(wrapped)
    grads = wrapped.unscale_gradients([array(np.inf)])
    clipped = ops.clip(grads[0], -1.0, 1.0)
    wrapped.apply([clipped], [w], unscaled=True)
    assert bool(wrapped.last_step_applied()) is False
    assert list(wrapped.overflow_counts.values()) == [1]
    assert float(w.numpy()[0]) == 0.0
    wrapped.apply([array(8.0)], [w])
    assert bool(wrapped.last_step_applied()) is True


def test_the_step_of_one_optimizer_does_not_decide_for_another():
    one, two = Wrapped("sgd"), Wrapped("sgd")
    v, w = (keras.Variable(np.ones(1, "float32")) for _ in range(2))
    for wrapped in (one, two):
        helpers.takes_scaled_gradients(wrapped)
    one.apply([array(np.inf)], [v])
    two.apply([array(2.0**15)], [w])
    assert (one.skipped_steps, two.skipped_steps) == (1, 0)
    assert (one.loss_scale, two.loss_scale) == (2.0**14, 2.0**15)
    assert float(v.numpy()[0]) == 1.0
    assert float(w.numpy()[0]) < 1.0


def test_gradients_added_up_by_the_user_are_checked_as_a_whole():
    wrapped = Wrapped(keras.optimizers.SGD(1.0), loss_scale=4.0)
    w = keras.Variable(np.zeros(1, "float32"))
    wrapped.build([w])
    helpers.takes_scaled_gradients(wrapped)
    wrapped.apply([array(4.0) + array(8.0)], [w])
    wrapped.apply([array(4.0) + array(np.nan)], [w])
    assert float(w.numpy()[0]) == -3.0


@helpers.requires_backend("tensorflow")
class TestTensorFlow:
    @pytest.mark.parametrize("compiled", [False, True])
    def test_a_gradient_function_traced_before_build_uses_the_live_scale(
        self, compiled
    ):
        import tensorflow as tf

        w = weight()
        wrapped = Wrapped(keras.optimizers.SGD(0.125))

        @tf.function(jit_compile=compiled, autograph=False)
        def gradient(factor):
            with tf.GradientTape() as tape:
                loss = wrapped.scale_loss(w.value * factor)
            return tape.gradient(loss, w.value)

        bad = gradient(tf.constant(np.inf))
        for _ in range(3):
            wrapped.apply([bad], [w])
        assert wrapped.loss_scale == 2.0**12
        wrapped.apply([gradient(tf.constant(1.0))], [w])
        assert float(w.numpy()) == 0.875

    def test_unscaling_and_applying_may_be_compiled_apart(self):
        import tensorflow as tf

        w = weight(0.0)
        wrapped = Wrapped(keras.optimizers.SGD(1.0), loss_scale=8.0)
        wrapped.build([w])

        @tf.function(autograph=False)
        def unscaled(factor):
            with tf.GradientTape() as tape:
                loss = wrapped.scale_loss(w.value * factor)
            grads = tape.gradient(loss, [w.value])
            return wrapped.unscale_gradients(grads)[0]

        @tf.function(autograph=False)
        def apply(gradient):
            wrapped.apply([gradient], [w], unscaled=True)
            return wrapped.last_step_applied()

        for _ in range(3):
            apply(tf.clip_by_value(unscaled(2.0), -1.0, 1.0))
        assert float(w.numpy()) == -3.0
        assert not bool(apply(tf.clip_by_value(unscaled(np.inf), -1.0, 1.0)))
        assert float(w.numpy()) == -3.0

    @pytest.mark.parametrize("compiled", [False, True])
    def test_a_gradient_penalty_comes_out_right(self, compiled):
        import tensorflow as tf

        def train(wrapped, w, scaled):
            @tf.function(jit_compile=compiled, autograph=False)
            def step(x):
                with tf.GradientTape() as outer:
                    with tf.GradientTape() as inner:
                        inner.watch(x)
                        y = w.value * x**2
                    slope = inner.gradient(y, x)
                    loss = y + slope**2
                    loss = wrapped.scale_loss(loss) if scaled else loss
                gradient = outer.gradient(loss, w.value)
                wrapped.apply([gradient], [w])

            for _ in range(3):
                step(tf.constant(0.5))
            return float(w.numpy())

        plain = keras.optimizers.SGD(0.1)
        plain.build([one := weight()])
        wrapped = Wrapped(keras.optimizers.SGD(0.1))
        wrapped.build([two := weight()])
        expected = train(plain, one, scaled=False)
        assert train(wrapped, two, scaled=True) == pytest.approx(expected)

    def test_an_embedding_gets_sparse_gradients_and_skips_bad_rows(self):
        import tensorflow as tf

        table = keras.Variable(np.ones((6, 2), "float32"))
        wrapped = Wrapped(keras.optimizers.SGD(1.0), loss_scale=4.0)
        wrapped.build([table])
        helpers.takes_scaled_gradients(wrapped)

        def gradient(value):
            values = tf.fill((3, 2), tf.constant(value, tf.float16))
            return tf.IndexedSlices(
                values, tf.constant([1, 1, 3]), tf.constant([6, 2])
            )

        wrapped.apply([gradient(4.0)], [table])
        assert table.numpy()[:, 0].tolist() == [1, -1, 1, 0, 1, 1]
        wrapped.apply([gradient(np.inf)], [table])
        assert not bool(wrapped.last_step_applied())
        # These are two float16 values of one row, whose sum float16 cannot
        # hold.
        wrapped.apply([gradient(64000.0)], [table])
        assert table.numpy()[1, 0] == -1 - 2 * 64000 / 4
        assert wrapped.skipped_steps == 1


@helpers.requires_backend("jax")
class TestJax:
    def test_your_own_compiled_step_uses_the_live_scale(self):
        import jax

        w = weight()
        wrapped = Wrapped(keras.optimizers.SGD(0.125))
        wrapped.build([w])

        @jax.jit
        def step(w_value, optimizer_values, factor):
            def loss(w_value):
                pairs = zip(wrapped.variables, optimizer_values, strict=True)
                with keras.StatelessScope(state_mapping=list(pairs)):
                    return wrapped.scale_loss(w_value * factor)

            gradient = jax.grad(loss)(w_value)
            (w_value,), optimizer_values = wrapped.stateless_apply(
                optimizer_values, [gradient], [w_value]
            )
            return w_value, optimizer_values

        value = w.value
        state = [variable.value for variable in wrapped.variables]
        for factor in [np.inf, np.nan, -np.inf, 1.0]:
            value, state = step(value, state, factor)
        assert float(value) == 0.875

    def test_stateless_apply_needs_a_built_optimizer(self):
        with pytest.raises(ValueError, match="needs a built optimizer"):
            Wrapped("sgd").stateless_apply([], [], [])


@helpers.requires_backend("tensorflow")
def test_stateless_apply_names_the_backend_it_needs():
    with pytest.raises(ValueError, match="backend='tensorflow'"):
        Wrapped("sgd").stateless_apply([], [], [])
