"""Progress is shown on a terminal, and nowhere else."""

import io
import sys

import keras
import numpy as np
import pytest

import tfmix
from tfmix import _progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def terminal(monkeypatch, stream=None):
    """Puts a terminal, or another stream, in place of `sys.stderr`."""
    # rich also reads the environment.
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stream or Terminal())
    return sys.stderr


def test_only_a_terminal_shows_progress(monkeypatch):
    stream = terminal(monkeypatch, io.StringIO())
    with _progress.shown("Working"):
        pass
    assert not stream.getvalue()


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda model: tfmix.check(model, np.ones((8, 4))), "Checking"),
        (lambda model: tfmix.convert_model(model, "bfloat16"), "Converting"),
    ],
    ids=["check", "convert"],
)
def test_slow_functions_show_progress(monkeypatch, call, expected):
    stream = terminal(monkeypatch)
    keras.config.set_dtype_policy("mixed_float16")
    layers = [keras.layers.Dense(4), tfmix.float32_output()]
    call(keras.Sequential([keras.Input((4,)), *layers]))
    assert expected in stream.getvalue()
