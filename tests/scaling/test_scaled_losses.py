"""Whether gradients can be of a scaled loss, in every split of a loop."""

import warnings

import keras
import numpy as np
import pytest

from tests import helpers
from tests.scaling.test_unscaled import MODES, Loop, array
from tfmix.scaling import optimizer as optimizers

Wrapped = optimizers.LossScaleOptimizer


def weight():
    return keras.Variable(np.zeros(1, "float32"))


def scaler(*variables, **settings):
    settings = settings or {"initial_scale": 8.0}
    made = Wrapped(keras.optimizers.SGD(1.0), **settings)
    made.build(variables)
    return made


@pytest.fixture(autouse=True)
def nothing_else_warns():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "The gradients are divided")
        yield


@pytest.mark.parametrize("mode", MODES)
def test_a_loss_scaled_in_a_function_of_its_own_reaches_every_step(mode):
    loop = Loop(mode)
    for count in range(1, 4):
        assert loop.apply(loop.scaled(array(2.0))) == -2.0 * count


def test_a_loop_that_forgets_to_scale_after_one_that_did_is_told():
    one = weight()
    wrapped = scaler(one)
    wrapped.apply([wrapped.scale_loss(array(2.0))], [one])
    with pytest.warns(UserWarning, match="was not multiplied by it"):
        wrapped.apply([array(2.0)], [one])


def test_it_is_told_before_its_gradients_are_clipped():
    one = weight()
    wrapped = scaler(one)
    true = wrapped.unscale_gradients([wrapped.scale_loss(array(2.0))])
    wrapped.apply(true, [one], unscaled=True)
    with pytest.warns(UserWarning, match="was not multiplied by it"):
        wrapped.unscale_gradients([array(2.0)])


# Keras says so of the variables left out.
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_one_scaled_loss_serves_all_variables_in_any_number_of_calls():
    first, second = weight(), weight()
    wrapped = scaler(first, second)
    for _ in range(2):
        scaled = wrapped.scale_loss(array(2.0))
        wrapped.apply([scaled], [first])
        wrapped.apply([scaled + 0.0], [second])
    assert first.numpy() == second.numpy() == -4.0


def test_gradients_may_be_applied_again_and_looked_at_afterwards():
    one = weight()
    wrapped = scaler(one)
    scaled = wrapped.scale_loss(array(2.0))
    wrapped.apply([scaled], [one])
    wrapped.apply([scaled], [one])
    assert float(wrapped.unscale_gradients([scaled])[0][0]) == 2.0
    assert one.numpy() == -4.0


@pytest.mark.parametrize("together", [True, False])
def test_each_of_several_losses_gives_gradients_of_its_own(together):
    one = weight()
    wrapped = scaler(one)
    for _ in range(2):
        losses = [array(2.0), array(3.0)]
        if together:
            losses = wrapped.scale_loss(losses)
        else:
            losses = [wrapped.scale_loss(each) for each in losses]
        for scaled in losses:
            wrapped.apply([scaled + 0.0], [one])
    assert one.numpy() == -10.0
    with pytest.warns(UserWarning, match="was not multiplied by it"):
        wrapped.apply([array(2.0)], [one])


def test_losses_may_be_scaled_many_times_before_they_are_applied():
    one = weight()
    wrapped = scaler(one)
    summed = sum(wrapped.scale_loss(array(2.0)) for _ in range(3))
    wrapped.apply([summed], [one])
    assert one.numpy() == -6.0


def test_a_loss_scaled_by_the_optimizer_that_shares_its_scale_counts():
    first, second = weight(), weight()
    leader = scaler(first)
    follower = scaler(second, loss_scale=leader)
    scaled = leader.scale_loss(array(2.0))
    leader.apply([scaled], [first])
    follower.apply([scaled + 0.0], [second])
    assert first.numpy() == second.numpy() == -2.0


@helpers.requires_backend("tensorflow")
def test_a_step_that_accumulates_in_a_branch_is_of_the_loss_around_it():
    import tensorflow as tf

    one = weight()
    wrapped = scaler(one)

    @tf.function
    def step(due):
        scaled = wrapped.scale_loss(tf.constant([2.0]))
        return tf.cond(
            due, lambda: wrapped.apply([scaled], [one]), lambda: False
        )

    step(tf.constant(False))
    step(tf.constant(True))
    assert one.numpy() == -2.0


@helpers.requires_backend("jax")
def test_a_gradient_taken_at_once_is_of_the_loss_it_scaled():
    import jax

    one = weight()
    wrapped = scaler(one)

    def loss(value):
        return wrapped.scale_loss(value[0] * 2.0)

    wrapped.apply([jax.grad(loss)(one.value)], [one])
    assert one.numpy() == -2.0
    with pytest.warns(UserWarning, match="was not multiplied by it"):
        wrapped.apply([array(2.0)], [one])


@helpers.requires_backend("jax")
def test_a_step_compiled_whole_leaves_nothing_for_the_next_loop():
    import jax

    one = weight()
    wrapped = scaler(one)

    @jax.jit
    def step(values, slots):
        def loss(values):
            pairs = zip(wrapped.variables, slots, strict=True)
            with keras.StatelessScope(state_mapping=pairs):
                return wrapped.scale_loss(values[0][0] * 2.0)

        return wrapped.stateless_apply(slots, jax.grad(loss)(values), values)

    slots = [v.value for v in wrapped.variables]
    (after,), _ = step([one.value], slots)
    assert float(after[0]) == -2.0
    with pytest.warns(UserWarning, match="was not multiplied by it"):
        wrapped.apply([array(2.0)], [one])


def one(function):
    return lambda optimizer, grads: [function(optimizer, grads[0])]


CLIPS = {
    "global_norm": lambda _, g: tf().clip_by_global_norm(g, 0.1)[0],
    "norm": one(lambda _, g: tf().clip_by_norm(g, 0.1)),
    "constant": one(lambda _, g: tf().clip_by_norm(g, tf().constant(0.1))),
    "value": one(lambda _, g: tf().clip_by_value(g, -0.1, 0.1)),
    "keras": one(lambda _, g: keras.ops.clip(g, -0.1, 0.1)),
}
FINE = {
    "not clipped": lambda _, g: g,
    "scaled bound": one(
        lambda o, g: tf().clip_by_norm(g, 0.1 * o.current_scale())
    ),
    "scaled global bound": lambda o, g: tf().clip_by_global_norm(
        g, 0.1 * o.current_scale()
    )[0],
    "multiplied afterwards": one(lambda _, g: tf().clip_by_norm(g, 0.1) * 1.0),
}


def tf():
    import tensorflow

    return tensorflow


def clipped_step(clip, jit, unscale=False):
    """Takes a step of gradients whose norm is 2, clipped; returns a weight."""
    weight = keras.Variable(np.zeros((4,), "float32"))
    optimizer = Wrapped(keras.optimizers.SGD(1.0))
    optimizer.build([weight])

    @tf().function(jit_compile=jit)
    def step():
        with tf().GradientTape() as tape:
            scaled = optimizer.scale_loss(keras.ops.sum(weight))
        grads = tape.gradient(scaled, [weight.value])
        if unscale:
            grads = optimizer.unscale_gradients(grads)
        optimizer.apply(clip(optimizer, grads), [weight], unscaled=unscale)

    step()
    return weight.numpy()


@helpers.requires_backend("tensorflow")
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", CLIPS)
def test_clipping_what_is_still_scaled_is_told_of(name, jit):
    with pytest.warns(UserWarning, match="Clip only what `optimizer.unsc"):
        update = clipped_step(CLIPS[name], jit)
    assert np.all(np.abs(update) < 1e-5)
    # Of true gradients it is right, and silent.
    update = clipped_step(CLIPS[name], jit, unscale=True)
    assert np.all(np.abs(update) > 0.04)


@helpers.requires_backend("tensorflow")
@pytest.mark.parametrize("name", FINE)
def test_what_is_not_surely_clipped_too_early_is_not_told_of(name):
    clipped_step(FINE[name], False)


def undivided(wrapped, one):
    wrapped.apply([wrapped.scale_loss(array(2.0))], [one], unscaled=True)


def test_gradients_called_divided_that_nobody_divided_are_told_of():
    one = weight()
    wrapped = scaler(one)
    with pytest.warns(UserWarning, match="`unscale_gradients` was not called"):
        undivided(wrapped, one)


@helpers.requires_backend("tensorflow")
@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_function_that_divides_nothing_is_told_as_it_is_traced(jit_compile):
    import tensorflow as tf

    one = weight()
    wrapped = scaler(one)

    @tf.function(jit_compile=jit_compile)
    def step():
        undivided(wrapped, one)

    with pytest.warns(UserWarning, match="`unscale_gradients` was not called"):
        step()


def test_gradients_of_a_loss_that_was_not_scaled_may_be_called_divided():
    one = weight()
    wrapped = scaler(one)
    wrapped.apply([wrapped.scale_loss(array(1.0))], [one])
    # A warning is an error here.
    wrapped.apply([array(1.0)], [one], unscaled=True)
    assert float(one.numpy()[0]) == -2.0
