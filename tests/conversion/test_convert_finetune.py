"""Trained in float32, converted, trained on, saved, loaded in plain Keras."""

import keras
import numpy as np
import pytest

from tests import processes, quick_compile
from tfmix.conversion import convert
from tfmix.loss_scaling import optimizer as scaling

LOAD_IN_PLAIN_KERAS = """
import sys, numpy as np, keras
model = keras.models.load_model("tuned.keras", compile=False)
assert not any(name.split(".")[0] == "tfmix" for name in sys.modules)
np.save("out.npy", model.predict(np.load("x.npy"), verbose=0))
"""


def digits():
    from sklearn import datasets, model_selection

    found = datasets.load_digits()
    x = (found.images[..., None] / 16.0).astype("float32")
    return model_selection.train_test_split(
        x, found.target, test_size=0.25, random_state=0, stratify=found.target
    )


def network():
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(12, 3, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Flatten(),
            keras.layers.Dense(48, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )


def accuracy(probabilities, y):
    return 100.0 * float((probabilities.argmax(axis=1) == y).mean())


@pytest.mark.slow
@quick_compile.quick_compile()
def test_fine_tuning_in_16_bit_is_as_good_as_in_float32(tmp_path):
    x, x_test, y, y_test = digits()
    model = network()
    model.compile("adam", "sparse_categorical_crossentropy")
    model.fit(x, y, batch_size=64, epochs=6, verbose=0)
    model.save(tmp_path / "trained.keras")
    tuned = keras.models.load_model(tmp_path / "trained.keras")
    report = convert.apply_policy(tuned, "mixed_float16")

    scores = []
    for each in (model, tuned):
        keras.utils.set_random_seed(11)
        each.fit(x, y, batch_size=64, epochs=6, verbose=0)
        scores.append(accuracy(each.predict(x_test, verbose=0), y_test))
    assert scores[1] > 96.0
    # One test image is 0.22 points.
    assert abs(scores[1] - scores[0]) <= 0.5

    assert type(tuned.optimizer) is scaling.LossScaleOptimizer
    assert "float16" in {layer.compute_dtype for layer in tuned.layers}
    tuned.save(tmp_path / "tuned.keras")
    expected = tuned.predict(x_test, verbose=0)
    np.save(tmp_path / "x.npy", x_test)
    # The other process must compile as quickly as this one.
    quickly = {quick_compile.OPTION.upper(): "1"}
    processes.python(
        "-c", LOAD_IN_PLAIN_KERAS, cwd=tmp_path, check=True, **quickly
    )
    loaded = np.load(tmp_path / "out.npy")
    np.testing.assert_array_equal(loaded, expected)

    report.undo()
    # Back in float32, the optimizer continues where it was.
    assert type(tuned.optimizer) is keras.optimizers.Adam
    assert int(tuned.optimizer.iterations) == 12 * 22
