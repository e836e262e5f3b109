"""Gives every test the same start, and restores global state after it.

Functions import Keras themselves: with `pytest -n 2`, one process only
distributes tests and does not need it, and all others wait for that process.
"""

import functools
import gc
import importlib.util
import itertools
import os
import re
import tempfile
import warnings

# Both must be set before the backend is imported. Eight CPU devices for JAX
# and four for TensorFlow (below) let replica tests run on any machine; the
# tests that use one device are no slower for it.
JAX_DEVICES = "--xla_force_host_platform_device_count=8"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {JAX_DEVICES}"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# JAX compiles each operation that it meets. All processes of a run share what
# one of them has compiled.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _compiled = tempfile.TemporaryDirectory(prefix="tfmix-jax-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _compiled.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
# Figures are drawn into files, even if there is a display.
os.environ.setdefault("MPLBACKEND", "agg")
# A sixth of the time until the first test went to garbage collections of what
# is imported, which stays.
gc.disable()

import pytest

from tests import sampling

TENSORFLOW_DEVICES = 4
# A quick run has these under one backend, because the backend matters little
# or only one can run them. It is mostly TensorFlow, as JAX compiles each
# operation that it meets.
TENSORFLOW_IS_ENOUGH = (
    "benchmarks/",
    "autocast/test_compile.py",
    "tools/callbacks/",
    "conversion/test_convert_applications.py",
    "conversion/test_copying.py",
    "conversion/test_layer_changes.py",
    "tools/diagnostics/",
    "ecosystem/test_keras",
    "ecosystem/test_recipes.py",
    "ecosystem/test_tasks.py",
    "examples/",
    "float8/test_chosen_layers.py",
    "tools/hardware/test_advice.py",
    "step/test_replicas.py",
    "loss_scaling/test_saving.py",
    "tools/test_cli.py",
    "tools/test_demo.py",
    "project/test_docs.py",
    "project/test_docstrings.py",
    "project/test_import_graph.py",
    "project/test_layout.py",
    "autocast/test_float32_output.py",
    "test_messages.py",
    "mutations/test_mutations.py",
    "orders/",
    "project/test_packaging.py",
    "project/test_public_api.py",
    "promises/test_quiet.py",
    "test_tables.py",
    "promises/test_untrusted_files.py",
    "wild/test_wild.py",
)
JAX_IS_ENOUGH = (
    "ops/test_recomputation.py",
    "step/test_replicas_jax.py",
    "optimizers/test_eight_bit.py",
    "optimizers/test_low_memory.py",
    "optimizers/test_float32_weights.py",
    "optimizers/test_sharded_slots.py",
    "project/test_import_light.py",
)

# Test files may import these in their first lines. An environment with an
# installed tfmix, one backend and no extra lacks some of them.
OPTIONAL = ("tensorflow", "jax", "benchmarks", "matplotlib", "sklearn")
OPTIONAL += ("statsmodels",)
# This counts the tests that have ended in this process.
_ended = itertools.count(1)
MISSING = [one for one in OPTIONAL if importlib.util.find_spec(one) is None]


def pytest_ignore_collect(collection_path):
    """Leaves out test files with imports that are not installed."""
    if collection_path.suffix != ".py" or not MISSING:
        return None
    text = collection_path.read_text(encoding="utf-8")
    imported = re.findall(r"^(?:import|from) (\w+)", text, re.M)
    return True if set(imported) & set(MISSING) else None


def pytest_report_header():
    """Lists the missing imports in the header."""
    if not MISSING:
        return None
    return f"left out: test files that import {', '.join(MISSING)}"


def pytest_addoption(parser):
    parser.addoption(
        "--all",
        action="store_true",
        help="run every case of every test, the slow ones too (make test-all)",
    )


def pytest_collection_modifyitems(config, items):
    """Leaves slow tests and most of a cross product to the complete run.

    A test that is named on the command line (`file.py::test_name`) runs with
    all its cases.
    """
    if _has_all_cases(config):
        return
    mine = ("tensorflow", "jax").index(_backend())
    kept = sampling.quick(items, _left_out, _is_shared, mine)
    left_out = [item for item in items if item not in kept]
    config.hook.pytest_deselected(items=left_out)
    # The longest file begins, so that no worker ends alone with it.
    kept = set(kept)
    items[:] = sorted(
        (item for item in items if item in kept),
        key=lambda item: item.path.name != "test_run.py",
    )


def _has_all_cases(config):
    return config.option.all or any("::" in name for name in config.args)


def _left_out(item):
    if item.get_closest_marker("slow"):
        return True
    # A case that is skipped here must not replace one that runs.
    if any(mark.args[0] for mark in item.iter_markers("skipif")):
        return True
    return _enough_under(item) not in (None, _backend())


def _is_shared(item):
    return _enough_under(item) is None and not item.get_closest_marker("skipif")


def _enough_under(item):
    """Returns the only backend of a test in a quick run, `None` for both."""
    if item.get_closest_marker("skipif"):
        # A test that one backend skips can only run under the other.
        return None
    return _enough_for(item.nodeid.partition("::")[0])


@functools.cache
def _enough_for(file):
    for backend, parts in (
        ("tensorflow", TENSORFLOW_IS_ENOUGH),
        ("jax", JAX_IS_ENOUGH),
    ):
        if any(f"tests/{part}" in file for part in parts):
            return backend
    return None


def pytest_collection_finish():
    """Excludes Keras and TensorFlow from garbage collection: they stay."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """Keeps a long run as fast as it began.

    Keras keeps some 10,000 objects of each model that TensorFlow has trained,
    which the garbage collector visits again and again. JAX keeps all compiled
    functions.
    """
    if not item.config.option.all:
        return
    is_last = nextitem is None or nextitem.path != item.path
    if is_last or next(_ended) % 20 == 0:
        pytest_collection_finish()
    if is_last and _backend() == "jax":
        import jax

        jax.clear_caches()


def pytest_sessionstart(session):
    """Splits the CPU into replicas and turns off TF32, which has 10 bits.

    A quick run turns off TensorFlow's graph optimizations. They take a tenth
    of the time, and graphs this small run only a few times. Slow tests need
    them: they compare bits with another process, which has them.
    """
    config = session.config
    hands_out = getattr(config.option, "numprocesses", None) and not hasattr(
        config, "workerinput"
    )
    if hands_out or _backend() != "tensorflow":
        return
    import tensorflow as tf

    tf.config.experimental.enable_tensor_float_32_execution(False)
    if not _has_all_cases(config):
        tf.config.optimizer.set_experimental_options(
            {"disable_meta_optimizer": True}
        )
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * TENSORFLOW_DEVICES
    )


@pytest.fixture(autouse=True)
def restored_global_state(monkeypatch):
    """Seeds the generators, then restores policy, float type and names.

    It depends on `monkeypatch`, so that a test's environment variables are
    restored as well before the next test starts.
    """
    import keras

    import tfmix
    from tfmix._keras import replacing

    floatx, keras_policy = keras.config.floatx(), keras.config.dtype_policy()
    tfmix_policy = tfmix.global_policy()
    keras.utils.set_random_seed(1337)
    yield
    tfmix.set_global_policy(tfmix_policy)
    with warnings.catch_warnings():
        # tfmix may warn about a lost policy, which is restored here.
        warnings.simplefilter("ignore")
        keras.utils.clear_session(free_memory=False)
    tfmix.set_global_policy(tfmix_policy)
    keras.config.set_dtype_policy(keras_policy)
    keras.config.set_floatx(floatx)
    # The import of tfmix does this, too.
    replacing.want(replacing.COMPILE, True)


@pytest.fixture(autouse=True)
def messages(monkeypatch, caplog):
    """Sends messages to `caplog`, and checks warnings about users' lines.

    A warning about a line of the user's code is raised as a Python warning
    here. It fails a test unless `pytest.warns` expects it.
    """
    from absl import logging

    from tfmix import _messages, _users_code

    # A page of the guide may change the verbosity.
    level = logging.get_verbosity()
    monkeypatch.setattr(_messages, "_said_once", set())
    monkeypatch.setattr(_users_code, "warn", warnings.warn)
    yield
    logging.set_verbosity(level)


@pytest.fixture
def said(monkeypatch):
    """Returns a list to which all warnings are added."""
    from tfmix import _messages

    seen = []
    monkeypatch.setattr(
        _messages, "warn", lambda text, *values: seen.append(text % values)
    )
    return seen


def _backend():
    import keras

    return keras.backend.backend()
