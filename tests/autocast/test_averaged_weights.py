"""`SwapEMAWeights` shows averages and restores the weights, in 16 bit, too."""

import keras
import numpy as np
import pytest

import tfmix
from tests import helpers

X = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def sgd():
    return keras.optimizers.SGD(0.01, use_ema=True, ema_momentum=0.5)


def low_memory():
    scaled = tfmix.optimizers.LowMemoryOptimizer(
        keras.optimizers.Adam(use_ema=True)
    )
    return tfmix.LossScaleOptimizer(scaled)


def masters(**settings):
    return tfmix.optimizers.MasterWeightOptimizer(sgd(), **settings)


OPTIMIZERS = {
    "low memory": ("mixed_float16", low_memory),
    "masters": ("float16", sgd),
    "flat": ("float16", lambda: masters(flat=True)),
    "split": ("bfloat16", lambda: masters(split=True)),
    "stochastic": (
        "bfloat16",
        lambda: tfmix.optimizers.BFloat16Optimizer(sgd(), seed=1),
    ),
}


def fitted(case, *callbacks):
    policy, make_optimizer = OPTIMIZERS[case]
    keras.utils.set_random_seed(0)
    with tfmix.policy_scope(policy):
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(1024),
                keras.layers.Dense(1, dtype="float32"),
            ]
        )
        model.compile(make_optimizer(), "mse")
    history = model.fit(
        *(X, Y),
        batch_size=4,
        epochs=3,
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
    )
    return model, history.history["loss"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", helpers.quick_are({"masters", "split", "stochastic"}, OPTIMIZERS)
)
def test_a_swap_shows_the_averages_and_changes_no_training(case):
    model, losses = fitted(case)
    swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    swapped, found = fitted(case, swap)
    # TensorFlow swaps with sums of the two.
    np.testing.assert_allclose(found, losses, rtol=1e-4)
    pairs = zip(swapped.get_weights(), model.get_weights(), strict=True)
    for weight, average in pairs:
        weight, average = weight.astype("float32"), average.astype("float32")
        np.testing.assert_allclose(weight, average, rtol=1e-2, atol=1e-4)


def move_weights_from_their_averages(model):
    optimizer = model.optimizer.inner_optimizer
    for variable in model.trainable_variables:
        if variable.dtype != "float32":
            moved = keras.ops.cast(variable, "float32") + 1.0
            optimizer.assign_float32(variable, moved)


@pytest.mark.costly
@pytest.mark.parametrize("case", ["masters", "split", "stochastic"])
def test_evaluate_sees_averages_and_leaves_the_weights(case):
    model, _ = fitted(case)
    expected = model.evaluate(X, Y, verbose=0)
    move_weights_from_their_averages(model)
    before = tfmix.optimizers.export_float32(model)
    swap = keras.callbacks.SwapEMAWeights()
    found = model.evaluate(X, Y, verbose=0, callbacks=[swap])
    assert found == pytest.approx(expected, rel=0.02)
    after = tfmix.optimizers.export_float32(model)
    for one, other in zip(after, before, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.costly
def test_predict_sees_averages():
    # Keras's callback does not swap back after `predict`.
    model, _ = fitted("masters")
    expected = model(X)
    move_weights_from_their_averages(model)
    swap = keras.callbacks.SwapEMAWeights()
    found = model.predict(X, verbose=0, callbacks=[swap])
    np.testing.assert_allclose(found, expected, rtol=0.02, atol=0.02)


@pytest.mark.costly
def test_without_averages_keras_raises_its_error():
    with tfmix.policy_scope("bfloat16"):
        model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="use_ema"):
        model.fit(
            *(X, Y), verbose=0, callbacks=[keras.callbacks.SwapEMAWeights(True)]
        )


@pytest.mark.costly
def test_weights_loaded_before_the_first_step_get_keras_warning(
    tmp_path, caplog
):
    model, _ = fitted("masters")
    model.save_weights(tmp_path / "a.weights.h5")
    with tfmix.policy_scope("float16"):
        fresh = keras.models.clone_model(model)
    fresh.compile(sgd(), "mse")
    with pytest.warns(UserWarning, match="Skipping") as warned:
        fresh.load_weights(tmp_path / "a.weights.h5")
    assert sum("Skipping" in str(each.message) for each in warned) == 1
    # Keras's own says that the optimizer was not built.
    assert not [m for m in caplog.messages if "is not built" in m]
