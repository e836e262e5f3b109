"""A search of keras-tuner runs under a policy."""

import keras
import numpy as np
import pytest

import tfmix

tuner = pytest.importorskip("keras_tuner")
pytestmark = [
    # keras-tuner uses the deprecated `currentThread`.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    # Keras and tfmix warn: it loads weights before the optimizer is built.
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
X = np.random.default_rng(0).normal(size=(32, 8)).astype("float32")


def network(choices):
    units = choices.Choice("units", [4, 8])
    hidden = keras.layers.Dense(units, activation="relu")
    outputs = [keras.layers.Dense(1), tfmix.float32_output()]
    model = keras.Sequential([keras.Input((8,)), hidden, *outputs])
    model.compile("adam", "mse", jit_compile=False)
    return model


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_a_search_finds_a_model_in_16_bit(policy, tmp_path):
    with tfmix.policy_scope(policy):
        search = tuner.RandomSearch(
            network, "val_loss", max_trials=2, directory=tmp_path
        )
        halves = {"validation_data": (X[16:], X[16:, :1])}
        search.search(X[:16], X[:16, :1], epochs=2, verbose=0, **halves)
        best = search.get_best_models(1)[0]
    assert best.layers[0].compute_dtype == policy[6:]
    for trial in search.oracle.get_best_trials(2):
        assert np.isfinite(trial.score)
