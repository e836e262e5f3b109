"""Keras's `fit` and `compile` call these methods, in this order."""

import inspect

import keras
import numpy as np
import pytest

from tests._keras.contracts import (
    with_metrics,
)
from tfmix._keras import training


@pytest.mark.costly
def test_metrics_of_compile_are_known_before_they_are_built():
    model = with_metrics()
    (given,) = model._compile_metrics._user_metrics
    assert not model._compile_metrics.built
    assert given not in model.metrics
    assert given in training.metrics(model)
    x = np.ones((2, 3, 4))
    model.fit(x, 0.0 * model.predict(x, verbose=0), verbose=0)
    assert model._compile_metrics.built
    assert training.metrics(model) == model.metrics


def test_keras_classes_are_in_modules_of_its_name():
    # tfmix distinguishes Keras's own layers and regularizers by this.
    assert keras.layers.Dense.__module__.startswith("keras.src.")
    assert keras.regularizers.L2.__module__.startswith("keras.src.")
    assert inspect.isfunction(vars(keras.regularizers.L2)["__call__"])
