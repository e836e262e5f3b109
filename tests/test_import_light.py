"""`import tfmix` is quick and imports nothing heavy; each check can fail."""

import json
import os

import keras
import pytest

from tests import processes

HEAVY = ("matplotlib", "pandas", "sklearn", "tensorboard", "tensorflow")
MOST_CALLS = 90_000  # function calls on top of those of `import keras`

# Blocking a module is a stronger check than looking for it afterwards: Keras
# itself imports matplotlib if it is installed.
BLOCKED = """
import sys
for name in {blocked!r}:
    sys.modules[name] = None
import {module}
"""

# Calls are counted instead of seconds, because a count is the same on every
# machine. 90,000 calls take a tenth of a second or two.
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


def run(code, folder=processes.ROOT, backend=None):
    backend = backend or keras.backend.backend()
    path = os.pathsep.join([str(folder), str(processes.ROOT)])
    return processes.python("-c", code, KERAS_BACKEND=backend, PYTHONPATH=path)


def imports_without(module, blocked, folder=processes.ROOT, backend="jax"):
    """Returns whether a module can be imported while others are blocked."""
    code = BLOCKED.format(module=module, blocked=blocked)
    done = run(code, folder, backend)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1]
        assert last.startswith("ModuleNotFoundError"), done.stderr
    return done.returncode == 0


def cost_of_import(module, folder=processes.ROOT):
    """Returns the number of calls of an import, and the modules it loads."""
    done = run(COUNTED.format(module=module), folder)
    assert done.returncode == 0, done.stderr
    calls, added = json.loads(done.stdout.splitlines()[-1])
    return calls, {name.split(".")[0] for name in added}


@pytest.fixture
def heavy_module(tmp_path):
    """A module that is slow to import, and imports something heavy."""
    (tmp_path / "tensorboard.py").write_text("x = 1\n")
    (tmp_path / "heavy.py").write_text(
        "import tensorboard\nfor number in range(100_000): abs(number)\n"
    )
    return tmp_path


@pytest.mark.slow
def test_import_under_jax_needs_neither_tensorflow_nor_matplotlib():
    pytest.importorskip("jax")
    assert imports_without("tfmix", HEAVY)


def test_the_import_check_fails_on_a_module_that_needs_one(heavy_module):
    assert not imports_without("heavy", HEAVY, heavy_module)


def test_import_is_quick_and_adds_nothing_heavy():
    calls, added = cost_of_import("tfmix")
    assert calls <= MOST_CALLS
    assert "tfmix" in added
    assert not added & set(HEAVY)


@pytest.mark.slow
def test_the_cost_check_fails_on_a_slow_and_heavy_module(heavy_module):
    calls, added = cost_of_import("heavy", heavy_module)
    assert calls > MOST_CALLS
    assert added & set(HEAVY) == {"tensorboard"}
