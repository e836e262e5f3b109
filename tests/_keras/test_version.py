"""A wrong Keras is refused at import, with advice on what to change."""

import importlib

import pytest

from tests import processes
from tfmix._keras import version as _host


@pytest.mark.parametrize(
    "version", ["3.12.0", "3.15.1", "3.16rc0", "3.20.0.dev0"]
)
@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_supported_versions_and_backends_pass(version, backend):
    assert _host.require_supported(version, backend) is None


OLD = r"3\.12 or newer.*'{}'.*pip install --upgrade"
OTHER = r"'tensorflow' and 'jax'.*'{}'.*KERAS_BACKEND"


@pytest.mark.parametrize(
    ("version", "backend", "message"),
    [
        *((old, "tensorflow", OLD.format(old)) for old in ("2.15.0", "3.11.3")),
        *(("3.15.1", one, OTHER.format(one)) for one in ("torch", "openvino")),
    ],
)
def test_others_are_refused_with_what_to_do(version, backend, message):
    with pytest.raises(ImportError, match=message):
        _host.require_supported(version, backend)


@pytest.mark.costly
def test_importing_tfmix_on_another_backend_fails_with_that_message():
    pytest.importorskip("scipy", reason="Keras's NumPy backend asks for it")
    done = processes.python("-c", "import tfmix", KERAS_BACKEND="numpy")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: tfmix works on Keras's backends")


def test_every_private_name_is_there():
    assert _host.require_private_names() is None


@pytest.mark.parametrize(
    ("version", "error", "message"),
    [
        ("3.99.0", ImportError, r"'Trainer'.*pip install 'keras=="),
        # This is our own fault, so it is raised unchanged.
        ("3.15.1", AttributeError, "Trainer"),
    ],
)
def test_a_newer_keras_without_a_private_name_is_refused(
    monkeypatch, version, error, message
):
    original = importlib.import_module

    def imported(name, *rest):
        if name.endswith("_keras.training"):
            raise AttributeError("no attribute 'Trainer'")
        return original(name, *rest)

    monkeypatch.setattr(_host.importlib, "import_module", imported)
    with pytest.raises(error, match=message):
        _host.require_private_names(version)
