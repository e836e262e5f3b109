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
LONGEST_IMPORT = 0.15  # seconds on top of `import keras`
ATTEMPTS = 4  # the first one compiles

# Blocking a module is stronger than looking for it afterwards: Keras itself
# imports matplotlib where it is installed.
BLOCKED = """
import sys
for name in {blocked!r}:
    sys.modules[name] = None
import {module}
"""

# Time of this process on the CPU: what an import costs with the files cached,
# and unlike time on the wall not the fault of what else runs on the machine.
TIMED = """
import json, sys, time
import keras
before = set(sys.modules)
sys.dont_write_bytecode, sys.pycache_prefix = False, {cache!r}
start = time.process_time()
import {module}
seconds = time.process_time() - start
print(json.dumps([seconds, sorted(set(sys.modules) - before)]))
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


def best_import(module, cache, folder=ROOT):
    """Returns the shortest time of a few imports, and what they brought in.

    Stops at the first that is quick enough: a slow one may be another
    program's fault, a quick one is nobody's. Compiled modules lie in `cache`,
    as beside an installed package, even where Python is told to keep none.
    """
    times = []
    for _ in range(ATTEMPTS):
        done = run(TIMED.format(module=module, cache=str(cache)), folder)
        assert done.returncode == 0, done.stderr
        seconds, added = json.loads(done.stdout.splitlines()[-1])
        times.append(seconds)
        if seconds <= LONGEST_IMPORT:
            break
    return min(times), {name.split(".")[0] for name in added}


@pytest.fixture
def heavy_module(tmp_path):
    """A module that is slow to import and asks for something heavy."""
    (tmp_path / "tensorboard.py").write_text("x = 1\n")
    (tmp_path / "heavy.py").write_text(
        "import time, tensorboard\n"
        "end = time.process_time() + 0.16\n"
        "while time.process_time() < end: pass\n"
    )
    return tmp_path


def test_import_under_jax_needs_neither_tensorflow_nor_matplotlib():
    pytest.importorskip("jax")
    assert imports_without("tfmix", HEAVY)


def test_that_check_fails_on_a_module_that_needs_one(heavy_module):
    assert not imports_without("heavy", HEAVY, heavy_module)


def test_import_is_quick_and_adds_nothing_heavy(tmp_path):
    seconds, added = best_import("tfmix", tmp_path)
    assert seconds <= LONGEST_IMPORT
    assert "tfmix" in added
    assert not added & set(HEAVY)


def test_that_check_fails_on_a_slow_and_heavy_module(heavy_module, monkeypatch):
    monkeypatch.setitem(globals(), "ATTEMPTS", 1)
    cache = heavy_module / "cache"
    seconds, added = best_import("heavy", cache, heavy_module)
    assert seconds > LONGEST_IMPORT
    assert added & set(HEAVY) == {"tensorboard"}
