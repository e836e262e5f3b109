"""A wrong Keras is refused at import, with advice on what to change."""

import importlib
import os
import subprocess
import sys

import pytest

from tfmix._keras import version as _host


@pytest.mark.parametrize("version", ["3.12.0", "3.15.1", "3.20.0.dev0", "4.0"])
@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_supported_versions_and_backends_pass(version, backend):
    assert _host.require_supported(version, backend) is None


@pytest.mark.parametrize("version", ["2.15.0", "3.0.5", "3.11.3"])
def test_an_older_keras_is_refused_with_the_command_that_upgrades(version):
    message = rf"3\.12 or newer.*'{version}'.*pip install --upgrade"
    with pytest.raises(ImportError, match=message):
        _host.require_supported(version, "tensorflow")


@pytest.mark.parametrize("backend", ["torch", "numpy", "openvino"])
def test_another_backend_is_refused_and_the_two_are_named(backend):
    message = rf"'tensorflow' and 'jax'.*'{backend}'.*KERAS_BACKEND"
    with pytest.raises(ImportError, match=message):
        _host.require_supported("3.15.1", backend)


@pytest.mark.costly
def test_importing_tfmix_on_another_backend_fails_with_that_message():
    pytest.importorskip("scipy", reason="Keras's NumPy backend asks for it")
    done = subprocess.run(
        [sys.executable, "-c", "import tfmix"],
        env={**os.environ, "KERAS_BACKEND": "numpy"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: tfmix works on Keras's backends")


def lacks_a_name(monkeypatch):
    original = importlib.import_module

    def imported(name, *rest):
        if name.endswith("_keras.training"):
            raise AttributeError("no attribute 'Trainer'")
        return original(name, *rest)

    monkeypatch.setattr(_host.importlib, "import_module", imported)


def test_every_private_name_is_there():
    assert _host.require_private_names() is None


def test_a_newer_keras_without_a_private_name_is_refused(monkeypatch):
    lacks_a_name(monkeypatch)
    with pytest.raises(ImportError, match=r"'Trainer'.*pip install 'keras=="):
        _host.require_private_names("3.99.0")


def test_our_own_fault_is_raised_unchanged(monkeypatch):
    lacks_a_name(monkeypatch)
    with pytest.raises(AttributeError, match="Trainer"):
        _host.require_private_names("3.15.1")
