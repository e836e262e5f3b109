"""The gradients of a loss that is not scaled are unscaled."""

import keras
import numpy as np
import pytest

import tfmix
from tests import helpers

X = np.ones((4, 3), "float32")
ON_JAX = keras.backend.backend() == "jax"
MODES = ["eager", "jit"] if ON_JAX else ["eager", "graph", "xla"]


def compiled():
    tfmix.set_global_policy("mixed_float16")
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1.0), "mse")
    return model


def saved_and_loaded(path):
    compiled().save(path)
    return keras.saving.load_model(path)


# A file keeps no guard.
@pytest.mark.costly
@pytest.mark.parametrize("loaded", [False, True])
def test_a_step_without_a_scaled_loss_is_whole(loaded, tmp_path):
    # A `train_step` that was written for float32 does this.
    model = saved_and_loaded(tmp_path / "m.keras") if loaded else compiled()
    optimizer, weights = model.optimizer, model.trainable_variables
    before = model.get_weights()
    for _ in range(2):
        gradients = [keras.ops.ones(one.shape) for one in weights]
        optimizer.apply(gradients, weights)
    for one, start in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, start - 1 - 1)


@helpers.requires_backend("jax")
def test_a_stateless_step_without_a_scaled_loss_is_whole():
    model = compiled()
    model.optimizer.build(model.trainable_variables)
    weights = [one.value for one in model.trainable_variables]
    slots = [one.value for one in model.optimizer.variables]
    gradients = [keras.ops.ones(one.shape) for one in weights]
    after, _ = model.optimizer.stateless_apply(slots, gradients, weights)
    for one, start in zip(after, weights, strict=True):
        np.testing.assert_array_equal(one, start - 1)


def unscaled_loop(optimizer, weights, mode):
    """Returns a step of a loop that ignores loss scales."""
    gradients = [keras.ops.ones(one.shape) for one in weights]
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        def step():
            optimizer.apply(gradients, weights)

        xla = mode == "xla"
        return step if mode == "eager" else tf.function(step, jit_compile=xla)
    apply = optimizer.stateless_apply
    if mode != "eager":
        import jax

        apply = jax.jit(apply)

    def stateless_step():
        slots = [one.value for one in optimizer.variables]
        new, slots = apply(slots, gradients, [one.value for one in weights])
        pairs = zip(
            [*weights, *optimizer.variables], [*new, *slots], strict=True
        )
        for variable, value in pairs:
            variable.assign(value)

    return stateless_step


def after_a_fit(mode, optimizer):
    tfmix.set_global_policy("mixed_float16")
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    settings = {"run_eagerly": mode == "eager"}
    if keras.backend.backend() == "tensorflow":
        settings["jit_compile"] = mode == "xla"
    model.compile(optimizer, "mse", **settings)
    model.fit(X, X[:, :1], verbose=0)
    return model


@pytest.mark.costly
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fitted", MODES)
def test_after_a_fit_a_step_without_a_scaled_loss_is_whole(fitted, mode):
    model = after_a_fit(fitted, keras.optimizers.SGD(1.0))
    weights = model.trainable_variables
    before = model.get_weights()
    step = unscaled_loop(model.optimizer, weights, mode)
    step()
    step()
    for one, start in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, start - 1 - 1)
    # `fit` continues to scale, here by what its float16 gradients can hold.
    model.optimizer.loss_scale = 8.0
    model.fit(X, X[:, :1], verbose=0)
    assert np.isfinite(model.get_weights()[0]).all()
    assert np.any(model.get_weights()[0] != before[0] - 2)


@pytest.mark.costly
@pytest.mark.parametrize("mode", MODES)
def test_after_a_fit_a_step_with_the_users_own_scaler_is_whole(mode):
    scaler = tfmix.LossScaleOptimizer(keras.optimizers.SGD(1.0))
    model = after_a_fit(mode, scaler)
    before = model.get_weights()
    unscaled_loop(scaler, model.trainable_variables, mode)()
    for one, start in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, start - 1)


@pytest.mark.parametrize("how", ["apply", "apply_gradients"])
@pytest.mark.parametrize("mode", ["eager", "graph"][: 2 - ON_JAX])
def test_the_warning_is_of_the_users_line(how, mode):
    scaler = tfmix.LossScaleOptimizer(keras.optimizers.SGD(1.0))
    weight = keras.Variable(X)
    scaler.build([weight])

    def step():
        gradients = [keras.ops.ones_like(weight.value)]
        if how == "apply":
            scaler.apply(gradients, [weight])
        else:
            scaler.apply_gradients([(gradients[0], weight)])

    if mode == "graph":
        import tensorflow as tf

        step = tf.function(step, autograph=False)
    with pytest.warns(UserWarning, match="not multiplied") as told:
        step()
    text = str(told[0].message)
    assert "`scaled = optimizer.scale_loss(loss)` inside the tape" in text
    assert "unscaled=True" in text
