"""A pytest plugin that runs Keras's tests under the policy of `$KERAS_SUITE`.

The policy is Keras's own (`keras:mixed_float16`) or that of tfmix
(`tfmix:mixed_float16`). Each outcome is a line of the file `$KERAS_SUITE_OUT`.
"""

import json
import os
import sys
import types

import keras
import pytest
from keras.src import testing

SYSTEM, _, POLICY = os.environ["KERAS_SUITE"].partition(":")
if SYSTEM == "tfmix":
    import tfmix

    set_policy = tfmix.set_global_policy
else:
    # Keras alone: importing tfmix changes a few methods of Keras.
    set_policy = keras.config.set_dtype_policy


def skip_if_backend(name, reason):
    return pytest.mark.skipif(keras.backend.backend() == name, reason=reason)


def pytest_configure(config):
    # Seven files import this from the `conftest.py` that the wheel lacks.
    conftest = types.ModuleType("conftest")
    conftest.skip_if_backend = skip_if_backend
    sys.modules["conftest"] = conftest

    # Keras clears its global state before each test, and with it the policy.
    original = testing.TestCase.setUp

    def set_up(self):
        original(self)
        # Both policies see the same weights and the same order of batches.
        keras.utils.set_random_seed(1337)
        set_policy(POLICY)

    testing.TestCase.setUp = set_up


@pytest.fixture(autouse=True)
def under_policy():
    set_policy(POLICY)
    yield
    set_policy("float32")


def pytest_runtest_logreport(report):
    if report.when == "call" or not report.passed:
        crash = getattr(report.longrepr, "reprcrash", None)
        line = {
            "test": report.nodeid.split("keras/src/")[-1],
            "outcome": report.outcome,
            "message": str(getattr(crash, "message", "")).split("\n")[0],
        }
        with open(os.environ["KERAS_SUITE_OUT"], "a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")
