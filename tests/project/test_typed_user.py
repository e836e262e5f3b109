"""A user's type checker sees the types of an installed tfmix."""

import os
import pathlib
import re
import shutil
import site
import subprocess
import sys
import venv

import pytest

import tfmix

USER = pathlib.Path(__file__).parent / "typed_user.py"
# Keras and TensorFlow have no types, so their users need this option as well.
MYPY = ["-m", "mypy", "--strict", "--disable-error-code=import-untyped"]


WRONG = """
import tfmix
tfmix.DynamicLossScale("large")
tfmix.hardware.advise(None, 32).share
text: str = tfmix.hardware.devices()[0].compute_capability
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """An environment in which tfmix is installed, as from a wheel."""
    folder = tmp_path_factory.mktemp("typed")
    venv.create(folder / "env", symlinks=True)
    (packages,) = folder.glob("env/lib/python*/site-packages")
    ours = pathlib.Path(tfmix.__file__).parent
    shutil.copytree(ours, packages / "tfmix")
    # tfmix's requirements come from the environment of the tests.
    others = "\n".join(site.getsitepackages())
    (packages / "others.pth").write_text(others)
    return folder


def checked(installed, program):
    """Runs mypy on a program in that environment."""
    file = installed / "program.py"
    file.write_text(program, encoding="utf-8")
    python = str(installed / "env/bin/python")
    return subprocess.run(
        [sys.executable, *MYPY, f"--python-executable={python}", file.name],
        cwd=installed,
        capture_output=True,
        text=True,
        check=False,
        # mypy must not find the tfmix of the tests.
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
    )


@pytest.mark.slow
def test_a_users_program_has_no_type_errors_and_wrong_uses_are_found(installed):
    done = checked(installed, USER.read_text(encoding="utf-8"))
    assert done.returncode == 0, done.stdout + done.stderr
    done = checked(installed, WRONG)
    said = re.findall(r"^program.py:(\d): .*\[(.*)\]$", done.stdout, re.M)
    expected = [("3", "arg-type"), ("4", "attr-defined"), ("5", "assignment")]
    assert said == expected, done.stdout


def test_the_program_uses_every_public_name():
    text = USER.read_text(encoding="utf-8")
    used = [name for name in tfmix.__all__ if f"tfmix.{name}" in text]
    modules = {"callbacks", "hardware", "optimizers"}
    assert set(used) | modules == set(tfmix.__all__)
