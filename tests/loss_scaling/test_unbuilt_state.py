"""A compiled, untrained model can be saved and loaded."""

import copy

import keras
import numpy as np
import pytest

import tfmix

INNER = {
    "adam": lambda: keras.optimizers.Adam(0.01),
    "masters": lambda: tfmix.optimizers.MasterWeightOptimizer(
        keras.optimizers.Adam(0.01), flat=True
    ),
}


def compiled(inner):
    with tfmix.policy_scope("float16"):
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(8),
                tfmix.float32_output(),
            ]
        )
        model.compile(
            tfmix.LossScaleOptimizer(INNER[inner](), loss_scale=64.0),
            loss="mse",
        )
    return model


@pytest.mark.costly
@pytest.mark.parametrize("inner", INNER)
# Keras warns of every optimizer that was saved before it was built.
@pytest.mark.filterwarnings("ignore:Skipping variable loading:UserWarning")
def test_a_model_saved_before_its_first_step_loads_and_trains(inner, tmp_path):
    model = compiled(inner)
    path = str(tmp_path / "new.keras")
    model.save(path)
    loaded = keras.models.load_model(path)
    tfmix.guard(loaded)
    x, y = np.ones((8, 4), "float32"), np.zeros((8, 8), "float32")
    before = loaded.get_weights()
    loaded.train_on_batch(x, y)
    assert loaded.optimizer.loss_scale == 64.0
    assert int(loaded.optimizer.iterations.numpy()) == 1
    assert not np.array_equal(before[0], loaded.get_weights()[0])


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.filterwarnings("ignore:Skipping variable loading:UserWarning")
def test_a_model_converts_before_its_first_step(inner):
    model = compiled(inner)
    served = tfmix.convert_model(model, "float16", inference=True)
    assert served.optimizer is None
    x = np.ones((8, 4), "float32")
    assert np.array_equal(served.predict(x), model.predict(x))


def test_a_copy_that_is_not_built_keeps_the_scale(said):
    optimizer = tfmix.LossScaleOptimizer("adam", initial_scale=64.0)
    assert copy.deepcopy(optimizer).loss_scale == 64.0
    assert not said
