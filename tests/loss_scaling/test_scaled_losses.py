"""A step knows whether gradients are scaled, however a loop is split."""

import warnings

import keras
import numpy as np
import pytest

from tests import helpers
from tests.loss_scaling.test_unscaled import MODES, Loop, array
from tfmix.loss_scaling import optimizer as optimizers

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
def test_a_loss_scaled_in_a_separate_function_reaches_every_step(mode):
    loop = Loop(mode)
    for count in range(1, 4):
        assert loop.apply(loop.scaled(array(2.0))) == -2.0 * count


# Keras warns of the variables that are left out.
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
def test_each_of_several_losses_gives_its_own_gradients(together):
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


def test_losses_may_be_scaled_many_times_before_they_are_applied():
    one = weight()
    wrapped = scaler(one)
    summed = sum(wrapped.scale_loss(array(2.0)) for _ in range(3))
    wrapped.apply([summed], [one])
    assert one.numpy() == -6.0


@helpers.requires_backend("tensorflow")
def test_a_step_that_accumulates_in_a_branch_is_of_the_loss_around_it():
    import tensorflow as tf

    one = weight()
    wrapped = scaler(one)

    @tf.function
    def step(due):
        scaled = wrapped.scale_loss(tf.constant([2.0]))
        return tf.cond(
            due, lambda: wrapped.apply([scaled], [one]), lambda: None
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


def test_gradients_of_a_plain_loss_may_be_passed_as_unscaled():
    one = weight()
    wrapped = scaler(one)
    wrapped.apply([wrapped.scale_loss(array(1.0))], [one])
    # A warning would be an error here.
    wrapped.apply([array(1.0)], [one], unscaled=True)
    assert float(one.numpy()[0]) == -2.0
