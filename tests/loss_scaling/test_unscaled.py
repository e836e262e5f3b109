"""A step depends only on its arguments, however a loop is split."""

import keras
import numpy as np
import pytest
from keras import ops

from tests import helpers
from tfmix.loss_scaling import optimizer as optimizers
from tfmix.loss_scaling import rules
from tfmix.loss_scaling import train_step_guard as guards

Wrapped = optimizers.LossScaleOptimizer
ON_JAX = keras.backend.backend() == "jax"
MODES = ["eager", "jit"] if ON_JAX else ["eager", "graph", "xla"]


def array(*values):
    return ops.convert_to_tensor(np.asarray(values, "float32"))


class Loop:
    """The functions of a training loop, each compiled separately in a mode.

    The gradient of the loss is the argument `factor`.
    """

    def __init__(self, mode, **settings):
        settings = settings or {"initial_scale": 8.0}
        self.weight = keras.Variable(np.zeros(1, "float32"), name="weight")
        self.optimizer = Wrapped(keras.optimizers.SGD(1.0), **settings)
        self.optimizer.build([self.weight])
        self.scaled = self._compiled(self._scaled, mode)
        self.unscaled = self._compiled(self._unscaled, mode)
        self._apply = {
            flag: self._compiled(lambda g, f=flag: self._step(g, f), mode)
            for flag in (False, True)
        }

    def apply(self, gradient, unscaled=False):
        """Applies a gradient; returns the weight."""
        self._apply[unscaled](gradient)
        return float(self.weight.numpy()[0])

    def _compiled(self, function, mode):
        if mode == "eager":
            return function
        if not ON_JAX:
            import tensorflow as tf

            return tf.function(function, jit_compile=mode == "xla")
        return self._stateless(function)

    def _stateless(self, function):
        import jax

        variables = [self.weight, *self.optimizer.variables]

        @jax.jit
        def pure(values, argument):
            mapping = list(zip(variables, values, strict=True))
            with keras.StatelessScope(state_mapping=mapping) as scope:
                result = function(argument)
            return result, [scope.get_current_value(v) for v in variables]

        def run(argument):
            result, values = pure([v.value for v in variables], argument)
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)
            return result

        return run

    def _scaled(self, factor):
        return self.optimizer.scale_loss(ops.convert_to_tensor(factor))

    def _unscaled(self, gradient):
        return self.optimizer.unscale_gradients([gradient])[0]

    def _step(self, gradient, unscaled):
        if not ON_JAX:
            self.optimizer.apply([gradient], unscaled=unscaled)
            return
        (value,), state = self.optimizer.stateless_apply(
            [v.value for v in self.optimizer.variables],
            [gradient],
            [self.weight.value],
            unscaled=unscaled,
        )
        self.weight.assign(value)
        for variable, new in zip(self.optimizer.variables, state, strict=True):
            variable.assign(new)


@pytest.mark.parametrize("mode", MODES)
def test_scaled_gradients_stay_scaled_after_a_look_at_unscaled_ones(mode):
    loop = Loop(mode)
    gradient = loop.scaled(array(2.0))
    assert float(loop.unscaled(gradient)[0]) == 2.0
    assert loop.apply(gradient) == -2.0


@pytest.mark.parametrize("mode", MODES)
def test_a_step_compiled_before_the_first_unscaling_applies_unscaled_ones(mode):
    loop = Loop(mode)
    assert loop.apply(loop.scaled(array(2.0))) == -2.0
    assert loop.apply(array(2.0), unscaled=True) == -4.0
    clipped = ops.clip(loop.unscaled(loop.scaled(array(9.0))), -1.0, 1.0)
    assert loop.apply(clipped, unscaled=True) == -5.0
    assert loop.apply(loop.scaled(array(2.0))) == -7.0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_unscaling_turns_what_is_not_finite_into_nan(mode, bad):
    loop = Loop(mode)
    true = loop.unscaled(loop.scaled(array(bad, 2.0)))
    assert np.isnan(helpers.to_numpy(true)).tolist() == [True, False]
    assert loop.apply(ops.clip(true[:1], -1.0, 1.0), unscaled=True) == 0.0
    assert loop.optimizer.skipped_steps == 1
    assert loop.optimizer.loss_scale == 4.0


@pytest.mark.parametrize("mode", MODES)
def test_an_unscaling_without_a_step_does_not_touch_the_next_one(mode):
    loop = Loop(mode)
    loop.unscaled(loop.scaled(array(np.inf)))
    assert loop.apply(loop.scaled(array(2.0))) == -2.0
    assert loop.optimizer.skipped_steps == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scale", [2.0**-10, 1.0])
def test_unscaled_gradients_are_checked_unchanged_at_any_scale(mode, scale):
    rule = rules.DynamicLossScale(initial_scale=scale, min_scale=scale)
    loop = Loop(mode, loss_scale=rule)
    # It is finite, but divided by such a scale it would not be.
    assert loop.apply(array(1e38), unscaled=True) < -9e37
    assert loop.optimizer.skipped_steps == 0


@helpers.requires_backend("tensorflow")
def test_the_infinities_of_sparse_gradients_come_back_as_nan():
    import tensorflow as tf

    wrapped = Wrapped("sgd", loss_scale=4.0)
    helpers.takes_scaled_gradients(wrapped)
    values = tf.constant([[8.0], [np.inf]], tf.float16)
    scaled = tf.IndexedSlices(values, tf.constant([0, 2]), tf.constant([3, 1]))
    (true,) = wrapped.unscale_gradients([scaled])
    assert true.values.dtype == tf.float32
    assert str(true.values.numpy().ravel().tolist()) == "[2.0, nan]"


def scaled_step():
    weight = keras.Variable(np.zeros(1, "float32"))
    wrapped = Wrapped(keras.optimizers.SGD(1.0), loss_scale=8.0)
    wrapped.build([weight])
    return wrapped, weight, [wrapped.scale_loss(array(2.0))]


def test_gradients_of_another_step_or_only_inspected_do_not_warn():
    wrapped, weight, grads = scaled_step()
    true = wrapped.unscale_gradients(grads)
    wrapped.apply(grads, [weight])
    wrapped.unscale_gradients(grads)
    wrapped.apply([wrapped.scale_loss(array(2.0))], [weight])
    wrapped.unscale_gradients(grads)
    wrapped.apply(true, [weight], unscaled=True)
    wrapped.apply([wrapped.scale_loss(array(2.0))], [weight])
    assert float(weight.numpy()[0]) == -8.0


def test_a_value_that_overwrites_its_variable_is_neither_scaled_nor_true():
    wrapped, weight, grads = scaled_step()
    amax = keras.Variable(np.ones(1, "float32"))
    amax.overwrite_with_gradient = True
    wrapped = Wrapped(keras.optimizers.SGD(1.0), loss_scale=8.0)
    wrapped.build([weight, amax])
    helpers.takes_scaled_gradients(wrapped)
    both = [*grads, array(3.0)]
    true = wrapped.unscale_gradients(both)
    assert [float(each[0]) for each in true] == [2.0, 3.0]
    wrapped.apply(both, [weight, amax])
    wrapped.apply(true, [weight, amax], unscaled=True)
    assert float(weight.numpy()[0]) == -4.0
    assert float(amax.numpy()[0]) == 3.0


@pytest.mark.parametrize("mode", MODES)
def test_the_scale_can_be_read_in_a_compiled_function(mode):
    loop = Loop(mode)
    read = loop._compiled(lambda _: loop.optimizer.loss_scale + 0.0, mode)
    assert float(read(array(0.0))) == 8.0
    loop.optimizer.loss_scale = 4.0
    assert float(read(array(0.0))) == 4.0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "read",
    [
        lambda wrapped: wrapped.skipped_steps,
        lambda wrapped: wrapped.consecutive_skips,
        lambda wrapped: list(wrapped.overflow_counts.values()),
        lambda wrapped: wrapped.check_health(),
    ],
    ids=["skipped_steps", "consecutive_skips", "overflow_counts", "health"],
)
def test_numbers_of_the_host_are_refused_in_a_compiled_function(mode, read):
    loop = Loop(mode)
    if mode == "eager":
        read(loop.optimizer)
        return
    count = loop._compiled(lambda _: read(loop.optimizer), mode)
    with pytest.raises(ValueError, match="outside the compiled function"):
        count(array(0.0))


class TestOldNames:
    def test_old_tf_keras_code_comes_out_right(self):
        for _ in range(2):
            wrapped, weight, _ = scaled_step()
            assert float(wrapped.get_scaled_loss(2.0)) == 16.0
            grads = wrapped.get_unscaled_gradients([array(16.0)])
            wrapped.apply_gradients([(ops.minimum(grads[0], 1.5), weight)])
            assert float(weight.numpy()[0]) == -1.5

    def test_apply_gradients_takes_scaled_ones_again_after_scale_loss(self):
        wrapped, weight, grads = scaled_step()
        true = wrapped.get_unscaled_gradients(grads)
        wrapped.apply_gradients([(true[0], weight)])
        grads = [wrapped.scale_loss(array(3.0))]
        wrapped.apply_gradients([(grads[0], weight)])
        assert float(weight.numpy()[0]) == -5.0

    def test_fit_and_an_old_loop_take_turns(self):
        model = keras.Sequential(
            [keras.Input((1,)), keras.layers.Dense(1, use_bias=False)]
        )
        wrapped = Wrapped(keras.optimizers.SGD(0.5), loss_scale=8.0)
        model.compile(wrapped, loss="mse")
        guards.guard(model)
        (weight,) = model.trainable_variables
        wrapped.build([weight])
        for _ in range(2):
            weight.assign([[3.5]])
            wrapped.get_scaled_loss(1.0)
            grads = wrapped.get_unscaled_gradients([array([8.0])])
            wrapped.apply_gradients([(grads[0], weight)])
            assert float(weight.numpy()[0, 0]) == 3.0
            # The gradient is twice the weight, so the step sets it to zero.
            model.fit(np.ones((4, 1)), np.zeros((4, 1)), verbose=0)
            assert float(weight.numpy()[0, 0]) == 0.0

    @helpers.requires_backend("tensorflow")
    @pytest.mark.parametrize("compiled", [False, True])
    def test_the_old_names_may_be_compiled_apart(self, compiled):
        import tensorflow as tf

        wrapped, weight, _ = scaled_step()

        @tf.function(jit_compile=compiled, autograph=False)
        def unscaled(factor):
            with tf.GradientTape() as tape:
                loss = wrapped.get_scaled_loss(weight.value * factor)
            grads = tape.gradient(loss, [weight.value])
            return wrapped.get_unscaled_gradients(grads)[0]

        @tf.function(jit_compile=compiled, autograph=False)
        def apply(gradient):
            wrapped.apply_gradients([(gradient, weight)])

        for _ in range(2):
            apply(tf.clip_by_value(unscaled(2.0), -1.0, 1.0))
        assert float(weight.numpy()[0]) == -2.0
        apply(tf.clip_by_value(unscaled(np.inf), -1.0, 1.0))
        assert (float(weight.numpy()[0]), wrapped.skipped_steps) == (-2.0, 1)


@helpers.requires_backend("jax")
class TestJax:
    CALLS = (
        lambda wrapped, value: wrapped.scale_loss(value),
        lambda wrapped, value: wrapped.get_scaled_loss(value),
        lambda wrapped, value: wrapped.unscale_gradients([value]),
        lambda wrapped, value: wrapped.current_scale(),
        lambda wrapped, value: value * wrapped.loss_scale,
        lambda wrapped, value: wrapped.apply([value]),
    )

    @pytest.mark.filterwarnings("ignore:The gradients are divided")
    @pytest.mark.parametrize("call", CALLS)
    def test_a_value_that_would_become_a_constant_is_refused(self, call):
        import jax

        wrapped, weight = Wrapped("sgd"), keras.Variable(np.zeros(1, "float32"))
        wrapped.build([weight])
        with pytest.raises(ValueError, match="StatelessScope|stateless_apply"):
            jax.jit(lambda value: call(wrapped, value))(array(1.0))
        with keras.StatelessScope([(weight, array(1.0))]):
            # A scope with values of other variables does not help.
            with pytest.raises(ValueError, match="Stateless|stateless_apply"):
                jax.jit(lambda value: call(wrapped, value))(array(1.0))
        call(wrapped, array(1.0))

    def test_a_counter_that_would_become_a_constant_is_refused(self):
        import jax

        wrapped = Wrapped("sgd")
        with pytest.raises(ValueError, match="outside the compiled"):
            jax.jit(lambda value: value * wrapped.skipped_steps)(array(1.0))

    def test_a_loop_that_jax_does_not_compile_needs_no_scope(self):
        import jax

        wrapped = Wrapped("sgd", initial_scale=8.0)
        slope = jax.grad(lambda w: wrapped.scale_loss(3.0 * w))
        assert float(slope(2.0)) == 24.0
        wrapped.loss_scale = 4.0
        assert float(slope(2.0)) == 12.0

    @pytest.mark.parametrize("rule", [8.0, rules.NoLossScale()])
    def test_a_scale_that_never_changes_may_become_a_constant(self, rule):
        import jax

        wrapped = Wrapped("sgd", loss_scale=rule)
        scaled = jax.jit(wrapped.scale_loss)(array(1.0))
        assert float(scaled[0]) == wrapped.loss_scale
