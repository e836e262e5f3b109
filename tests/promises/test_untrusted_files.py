"""Code in an untrusted file does not run, and its names are escaped."""

import dataclasses
import pathlib

import keras
import numpy as np
import pytest

from tests import helpers
from tfmix import _tables
from tfmix.tools import cli

# Quotes end an HTML attribute, and brackets begin a tag of HTML or rich.
HOSTILE = "a\"b'c<img src=x onerror=alert(1)>&amp;[red]"


class Trace:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return pathlib.Path.touch, (self.path,)


@pytest.fixture
def trace(tmp_path, monkeypatch):
    """A file that exists after a stranger's code has run."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "it-ran"


@pytest.fixture(params=["keras", "h5"])
def model_file(request, tmp_path, trace):
    """A saved model with a Lambda layer whose code writes the trace."""

    def code(x):
        open("it-ran", "w").close()
        return x

    # Keras only stores the code of functions with this name.
    code.__name__ = "<lambda>"
    model = keras.Sequential([keras.Input((4,)), keras.layers.Lambda(code)])
    path = tmp_path / f"model.{request.param}"
    model.save(path)
    trace.unlink()
    return path


# Commands on a model, with the words that follow its name.
MORE = {
    "advise": ["--batch-size=2"],
    "check": ["--data", "batch.npy"],
    "compile": ["--batch=2", "--target=h200"],
    "convert": ["converted.keras", "--policy=mixed_float16"],
}


@pytest.mark.parametrize("command", MORE)
def test_the_code_in_a_model_is_refused(command, model_file, trace, capsys):
    np.save("batch.npy", np.ones((2, 4), "float32"))
    words = [command, str(model_file), *MORE[command]]
    assert cli.main(words) == cli.BAD_INPUT
    assert "afe" in capsys.readouterr().err  # Keras's "unsafe", "safe_mode"
    assert not trace.exists()


def test_the_same_code_runs_if_allowed(model_file, trace):
    keras.saving.load_model(model_file, safe_mode=False)
    assert trace.exists()


@pytest.mark.parametrize("save", [np.save, np.savez])
def test_a_pickle_in_the_data_is_refused(save, trace, capsys):
    layers = [keras.Input((4,)), keras.layers.Dense(2)]
    keras.Sequential(layers).save("model.keras")
    name = "batch.npy" if save is np.save else "batch.npz"
    save(name, np.array([Trace(trace)], dtype=object), allow_pickle=True)
    words = ["check", "model.keras", "--data", name]
    assert cli.main(words) == cli.BAD_INPUT
    assert "allow_pickle" in capsys.readouterr().err
    assert not trace.exists()
    loaded = np.load(name, allow_pickle=True)
    _ = loaded["arr_0"] if save is np.savez else loaded
    assert trace.exists()


def assert_only_text(page):
    """Checks that a name on a page is neither a tag nor an attribute."""
    assert "<img src=x" not in page
    # A narrow column wraps the name, so its beginning is searched.
    assert "&lt;img" in page


def test_an_unescaped_name_is_found():
    with pytest.raises(AssertionError):
        assert_only_text(f"<p>{HOSTILE}</p>")


def test_every_part_of_a_table_is_escaped():
    table = _tables.Table(
        (HOSTILE,), [(HOSTILE,)], HOSTILE, (HOSTILE,), (HOSTILE,)
    )
    tables = [dataclasses.replace(table, title=""), table]

    class Tables(_tables.Printed):
        def tables(self):
            return tables

    page = helpers.notebook_html(Tables())
    assert_only_text(page)
    # The name is a title, and in each table's head, a cell, a note and code.
    assert page.count("&lt;img") == 9
    assert page.count("[red]") == 9
