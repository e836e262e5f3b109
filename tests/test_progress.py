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


def lines_shown(monkeypatch, stream, **settings):
    monkeypatch.setattr(sys, "stderr", stream)
    # rich also reads the environment.
    monkeypatch.setenv("TERM", "xterm")
    with _progress.shown("Working", **settings) as say:
        say("Working: 2 of 3")
    return stream.getvalue()


def test_a_terminal_shows_the_line(monkeypatch):
    assert "Working: 2 of 3" in lines_shown(monkeypatch, Terminal())


def test_a_known_share_is_shown_as_a_bar(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with _progress.shown("Working") as say:
        say("Working", 0.5)
    half = "━" * 10
    assert f"{half}" in terminal.getvalue().split("Working")[-1]


def test_only_a_terminal_shows_progress(monkeypatch):
    assert not lines_shown(monkeypatch, io.StringIO())
    assert not lines_shown(monkeypatch, Terminal(), hidden=True)


@pytest.mark.parametrize("what", ["check", "convert"])
def test_slow_functions_show_progress(what, monkeypatch):
    keras.config.set_dtype_policy("mixed_float16")
    layers = [keras.layers.Dense(4), tfmix.float32_output()]
    model = keras.Sequential([keras.Input((4,)), *layers])
    x = np.ones((8, 4), "float32")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    if what == "check":
        tfmix.check(model, x)
    else:
        tfmix.convert_model(model, "bfloat16")
    expected = "Checking" if what == "check" else "Converting"
    assert expected in terminal.getvalue()
