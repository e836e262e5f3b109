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


OPTIMIZERS = {
    "low memory": ("mixed_float16", low_memory),
    "masters": ("float16", sgd),
    "flat": (
        "float16",
        lambda: tfmix.optimizers.MasterWeightOptimizer(sgd(), flat=True),
    ),
    "split": (
        "bfloat16",
        lambda: tfmix.optimizers.MasterWeightOptimizer(sgd(), split=True),
    ),
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


@pytest.mark.costly
@pytest.mark.parametrize("case", ["masters", "split", "stochastic"])
def test_evaluate_sees_averages_and_leaves_the_weights(case):
    class Sees(keras.callbacks.Callback):
        def on_test_end(self, logs=None):
            seen.append(self.model.get_weights())

    seen = []
    model, _ = fitted(case)
    kernel = model.trainable_variables[0]
    moved = keras.ops.convert_to_numpy(kernel).astype("float32") + 1.0
    optimizer = model.optimizer.inner_optimizer
    optimizer.assign_float32(kernel, moved)
    exact = keras.ops.convert_to_numpy(optimizer.read_float32(kernel))
    swap = keras.callbacks.SwapEMAWeights()
    model.evaluate(X, Y, verbose=0, callbacks=[Sees(), swap])
    after = keras.ops.convert_to_numpy(optimizer.read_float32(kernel))
    np.testing.assert_array_equal(after, exact)
    shown = np.asarray(seen[0][0], "float32")
    np.testing.assert_allclose(shown, moved - 1.0, rtol=0.02, atol=0.02)


@pytest.mark.costly
def test_predict_sees_averages():
    # Keras's callback does not swap back after `predict`.
    model, _ = fitted("masters")
    expected = model(X)
    optimizer = model.optimizer.inner_optimizer
    for variable in model.trainable_variables:
        if variable.dtype == "float16":
            optimizer.assign_float32(variable, variable + 1.0)
    swap = keras.callbacks.SwapEMAWeights()
    found = model.predict(X, verbose=0, callbacks=[swap])
    np.testing.assert_allclose(found, expected, rtol=0.02, atol=0.02)


@pytest.mark.costly
def test_without_averages_it_is_kerass_own_error():
    with tfmix.policy_scope("bfloat16"):
        model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="use_ema"):
        model.fit(
            *(X, Y), verbose=0, callbacks=[keras.callbacks.SwapEMAWeights(True)]
        )


@pytest.mark.slow
@helpers.requires_backend("tensorflow")
def test_replicas_swap_as_one_device_does_and_trace_it_once(monkeypatch):
    model, losses = fitted("masters")
    with helpers.mirrored_strategy().scope():
        twin, found = fitted(
            "masters", keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
        )
    np.testing.assert_allclose(found, losses, rtol=1e-2)
    optimizer, traced = twin.optimizer.inner_optimizer, []
    finalize = type(optimizer.inner_optimizer).finalize_variable_values
    monkeypatch.setattr(
        type(optimizer.inner_optimizer),
        "finalize_variable_values",
        lambda *args: traced.append(finalize(*args)),
    )
    optimizer.finalize_variable_values([])
    twin.fit(X, Y, verbose=0)
    assert traced == []


@pytest.mark.costly
def test_weights_loaded_before_the_first_step_get_one_warning_from_each(
    tmp_path, caplog
):
    model, _ = fitted("masters")
    model.save_weights(tmp_path / "a.weights.h5")
    with tfmix.policy_scope("float16"):
        fresh = keras.models.clone_model(model)
    fresh.compile(sgd(), "mse")
    with pytest.warns(UserWarning, match="Skipping") as told:
        fresh.load_weights(tmp_path / "a.weights.h5")
    skipped = [str(each.message) for each in told]
    assert sum("Skipping" in each for each in skipped) == 1
    assert len([m for m in caplog.messages if "is not built" in m]) == 1
