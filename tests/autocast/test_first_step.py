"""A long first step explains why it takes long; a short one prints nothing."""

import threading
import time

import keras
import numpy as np
import pytest

import tfmix
from tfmix.autocast import first_step

X = np.ones((8, 4), "float32")
XLA = keras.backend.backend() == "jax"


@keras.saving.register_keras_serializable(package="tests")
class Slow(keras.layers.Layer):
    """Takes a second to trace."""

    fails = False

    def call(self, inputs):
        time.sleep(1.0)
        if self.fails:
            raise ValueError("on purpose")
        return inputs


def compiled(optimizer="sgd"):
    tfmix.set_global_policy("mixed_float16")
    layers = [keras.layers.Dense(4), Slow()]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile(optimizer, "mse", jit_compile=XLA)
    return model


def waited(caplog):
    return [text for text in caplog.messages if "the first step has" in text]


@pytest.mark.parametrize(
    ("optimizer", "cause"),
    [
        ("sgd", "XLA, which compiles it" if XLA else "builds its graph"),
        pytest.param(
            tfmix.optimizers.LowMemoryOptimizer("adam"),
            "8-bit optimizer state" if XLA else "builds its graph",
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.costly
def test_a_long_first_step_reports_once_what_it_waits_for(
    optimizer, cause, caplog, monkeypatch
):
    monkeypatch.setattr(first_step, "_LONG", 0.5)
    model = compiled(optimizer)
    model.fit(X, X, epochs=2, verbose=0)
    (text,) = waited(caplog)
    assert cause in text
    function = model.train_function
    model.fit(X, X, verbose=0)
    assert len(waited(caplog)) == 1
    # Nothing wraps the steps after the first.
    assert model.train_function is function
    assert function.__module__ != first_step.__name__


@pytest.mark.costly
def test_a_short_first_step_logs_nothing(caplog, monkeypatch):
    monkeypatch.setattr(first_step, "_LONG", 120.0)
    compiled().fit(X, X, verbose=0)
    assert not waited(caplog)
    assert not timers()


@pytest.mark.costly
def test_a_first_step_that_fails_leaves_nothing_behind(monkeypatch):
    monkeypatch.setattr(first_step, "_LONG", 120.0)
    model = compiled()
    monkeypatch.setattr(Slow, "fails", True)
    with pytest.raises(ValueError, match="on purpose"):
        model.fit(X, X, verbose=0)
    assert not timers()


def timers():
    threads = threading.enumerate()
    found = [one for one in threads if isinstance(one, threading.Timer)]
    for one in found:
        one.join(1.0 if one.finished.is_set() else 0.0)
    return [one for one in found if one.is_alive()]
