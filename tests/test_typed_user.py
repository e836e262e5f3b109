"""A user's type checker sees tfmix's types, from outside of the tree."""

import os
import pathlib
import shutil
import site
import subprocess
import sys
import venv

import pytest

import tfmix

USER = pathlib.Path(__file__).parent / "typed_user.py"
# Keras and TensorFlow ship no types: what a user of theirs writes, too.
MYPY = ["-m", "mypy", "--strict", "--disable-error-code=import-untyped"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """An environment that tfmix is installed in, as a wheel is."""
    folder = tmp_path_factory.mktemp("typed")
    venv.create(folder / "env", symlinks=True)
    (packages,) = folder.glob("env/lib/python*/site-packages")
    ours = pathlib.Path(tfmix.__file__).parent
    shutil.copytree(ours, packages / "tfmix")
    # What tfmix needs, from the environment of the tests.
    others = "\n".join(site.getsitepackages())
    (packages / "others.pth").write_text(others)
    return folder


def checked(installed, program):
    """Runs mypy on a program as that environment's user would."""
    file = installed / "program.py"
    file.write_text(program, encoding="utf-8")
    python = str(installed / "env/bin/python")
    return subprocess.run(
        [sys.executable, *MYPY, f"--python-executable={python}", file.name],
        cwd=installed,
        capture_output=True,
        text=True,
        check=False,
        # Not from where the tests find it.
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
    )


@pytest.mark.slow
def test_a_users_program_has_no_type_errors(installed):
    done = checked(installed, USER.read_text(encoding="utf-8"))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_wrong_uses_are_found(installed):
    wrong = """
import tfmix
tfmix.DynamicLossScale("large")
tfmix.hardware.advise(None, 32).share
text: str = tfmix.hardware.devices()[0].compute_capability
"""
    done = checked(installed, wrong)
    for line, code in [(3, "arg-type"), (4, "attr-defined"), (5, "assignment")]:
        assert any(
            said.startswith(f"program.py:{line}: ") and f"[{code}]" in said
            for said in done.stdout.splitlines()
        ), done.stdout


@pytest.mark.slow
def test_without_the_marker_of_types_nothing_is_known(installed):
    (marker,) = installed.glob("env/lib/python*/site-packages/tfmix/py.typed")
    marker.unlink()
    done = checked(installed, USER.read_text(encoding="utf-8"))
    assert "[assert-type]" in done.stdout


def test_the_program_uses_every_public_name():
    text = USER.read_text(encoding="utf-8")
    used = [name for name in tfmix.__all__ if f"tfmix.{name}" in text]
    modules = {"callbacks", "hardware", "optimizers"}
    assert set(used) | modules == set(tfmix.__all__)
