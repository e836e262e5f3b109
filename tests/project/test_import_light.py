"""`import tfmix` is quick and imports nothing heavy; each check can fail."""

import json
import os

import keras
import pytest

from tests import helpers, processes

HEAVY = ("matplotlib", "pandas", "sklearn", "tensorboard", "tensorflow")
MOST_CALLS = 90_000  # function calls on top of those of `import keras`

TRAINING = """
import keras, numpy as np, tfmix
tfmix.set_global_policy("mixed_float16")
model = keras.Sequential([keras.layers.Dense(2), tfmix.float32_output()])
model.compile("adam", loss="mse")
x = np.ones((64, 4), "float32")
x[0] = np.nan
model.fit(x, x[:, :2], batch_size=32, shuffle=False, verbose=0)
print(model.optimizer.skipped_steps)
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


def run(code, folder=processes.ROOT, blocked=(), backend=None):
    """Runs code in a process that cannot import some modules."""
    # Blocking is a stronger check than looking for a module afterwards: Keras
    # itself imports matplotlib if it is installed.
    blocking = f"import sys; sys.modules |= dict.fromkeys({blocked!r})\n"
    path = os.pathsep.join([str(folder), str(processes.ROOT)])
    backend = backend or keras.backend.backend()
    return processes.python(
        "-c", blocking + code, KERAS_BACKEND=backend, PYTHONPATH=path
    )


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


def test_import_is_quick_and_adds_nothing_heavy():
    calls, added = cost_of_import("tfmix")
    assert calls <= MOST_CALLS
    assert "tfmix" in added
    assert not added & set(HEAVY)


@pytest.mark.slow
@helpers.requires_backend("jax")
def test_training_on_jax_needs_nothing_heavy():
    done = run(TRAINING, blocked=HEAVY)
    assert done.stdout.strip() == "1", done.stderr


def test_the_error_without_a_backend_names_what_to_install():
    done = run("import tfmix", blocked=("tensorflow",), backend="tensorflow")
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: tfmix needs Keras and its backend")
    assert "no module 'tensorflow" in last
    assert "pip install 'keras>=3.12' jax`" in last


@pytest.mark.slow
def test_the_checks_fail_on_a_slow_and_heavy_module(heavy_module):
    calls, added = cost_of_import("heavy", heavy_module)
    assert calls > MOST_CALLS
    assert added & set(HEAVY) == {"tensorboard"}
    done = run("import heavy", heavy_module, blocked=HEAVY)
    assert "ModuleNotFoundError" in done.stderr
