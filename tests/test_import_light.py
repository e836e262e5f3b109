"""`import tfmix` is quick and brings in nothing heavy; each check can fail."""

import json
import os
import pathlib
import subprocess
import sys

import keras
import pytest

ROOT = pathlib.Path(__file__).parent.parent
HEAVY = ("matplotlib", "pandas", "sklearn", "tensorboard", "tensorflow")
MOST_CALLS = 90_000  # of functions, on top of `import keras`

# Blocking a module is stronger than looking for it afterwards: Keras itself
# imports matplotlib where it is installed.
BLOCKED = """
import sys
for name in {blocked!r}:
    sys.modules[name] = None
import {module}
"""

# Calls are counted, not seconds: a count is the same on every machine. 90,000
# take a tenth of a second or two.
COUNTED = """
import json, sys
import keras
before, calls = set(sys.modules), 0
def count(frame, event, argument):
    global calls
    calls += event.endswith("call")
sys.setprofile(count)
import {module}
sys.setprofile(None)
print(json.dumps([calls, sorted(set(sys.modules) - before)]))
"""


def run(code, folder=ROOT, backend=None):
    backend = backend or keras.backend.backend()
    path = os.pathsep.join([str(folder), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "KERAS_BACKEND": backend, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def imports_without(module, blocked, folder=ROOT, backend="jax"):
    """Tells whether a module imports while others cannot be imported."""
    code = BLOCKED.format(module=module, blocked=blocked)
    done = run(code, folder, backend)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1]
        assert last.startswith("ModuleNotFoundError"), done.stderr
    return done.returncode == 0


def cost_of_import(module, folder=ROOT):
    """Returns how many calls an import makes, and what it brings in."""
    done = run(COUNTED.format(module=module), folder)
    assert done.returncode == 0, done.stderr
    calls, added = json.loads(done.stdout.splitlines()[-1])
    return calls, {name.split(".")[0] for name in added}


@pytest.fixture
def heavy_module(tmp_path):
    """A module that is slow to import and asks for something heavy."""
    (tmp_path / "tensorboard.py").write_text("x = 1\n")
    (tmp_path / "heavy.py").write_text(
        "import tensorboard\nfor number in range(100_000): abs(number)\n"
    )
    return tmp_path


@pytest.mark.slow
def test_import_under_jax_needs_neither_tensorflow_nor_matplotlib():
    pytest.importorskip("jax")
    assert imports_without("tfmix", HEAVY)


def test_that_check_fails_on_a_module_that_needs_one(heavy_module):
    assert not imports_without("heavy", HEAVY, heavy_module)


def test_import_is_quick_and_adds_nothing_heavy():
    calls, added = cost_of_import("tfmix")
    assert calls <= MOST_CALLS
    assert "tfmix" in added
    assert not added & set(HEAVY)


@pytest.mark.slow
def test_that_check_fails_on_a_slow_and_heavy_module(heavy_module):
    calls, added = cost_of_import("heavy", heavy_module)
    assert calls > MOST_CALLS
    assert added & set(HEAVY) == {"tensorboard"}
