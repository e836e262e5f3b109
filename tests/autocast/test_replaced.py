"""The list names exactly what is replaced, and `"float32"` restores it.

The comparison looks at every attribute of every module and class of Keras,
TensorFlow and JAX, and knows nothing of the list.
"""

import inspect
import re
import sys

import keras
import numpy as np
import pytest

import tfmix
from tests import helpers, processes
from tests.autocast import replaced_names
from tests.tree import ROOT
from tfmix._keras import context, op_places, replacing, version
from tfmix.autocast import global_policy, replaced
from tfmix.optimizers import wrapper
from tfmix.policy import policy as policies


class Comparison:
    """Remembers the functions, classes and modules of Keras and its backend.

    An optimizer of tfmix's has an `apply` beside that of Keras's optimizers.
    """

    def __init__(self):
        self._owners = replaced_names.owners(wrapper.OptimizerWrapper)
        self._before = replaced_names.snapshot(self._owners)

    def changed(self):
        """Returns the labels of all places that have changed."""
        return labels(replaced_names.changed(self._before, self._owners))


def labels(places):
    return sorted(replaced_names.label(*place) for place in places)


def listed(rules):
    """Returns the labels of all places on the list."""
    groups = replaced.COMPILE, replaced.LAYERS, replaced.OPS
    return labels(p for g in groups for p, _, _ in replaced.names(g, rules))


@pytest.fixture
def comparison():
    tfmix.set_global_policy("float32")
    train()
    yield Comparison()
    tfmix.set_global_policy("float32")


def train():
    """Makes Keras import and cache everything that it does on first use."""
    model = keras.Sequential([keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    model.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)


@pytest.mark.parametrize(
    "policy",
    helpers.quick_are({"mixed_float16"}, ["mixed_float16", "bfloat16", "O1"]),
)
def test_what_differs_from_plain_keras_is_on_the_list(comparison, policy):
    tfmix.set_global_policy(policy)
    train()
    names = listed(context.installed.rules)
    assert comparison.changed() == names
    # What `tfmix.environment` prints.
    assert labels(replacing.replaced()) == names
    tfmix.set_global_policy("float32")
    assert not comparison.changed()
    assert not replacing.replaced()


@pytest.mark.skipif(
    version.numbers(keras.__version__) < (3, 15),
    reason="the guide counts those of the latest Keras",
)
def test_the_guide_says_how_many_names_are_replaced():
    page = (ROOT / "docs/how-it-works.md").read_text("utf-8")
    counts = re.search(r"(\d+) under TensorFlow, (\d+) under\s+JAX", page)
    of_backend = dict(zip(["tensorflow", "jax"], counts.groups(), strict=True))
    rules = policies.rules_of(policies.Policy("mixed_float16"))
    names = listed(rules)
    assert len(names) == int(of_backend[keras.backend.backend()]), names


@helpers.requires_backend("tensorflow")
def test_tensorflows_registry_gets_gradients_of_our_own_names_only():
    from tensorflow.python.framework import ops

    before = set(ops.gradient_registry.list())
    tfmix.set_global_policy("mixed_float16")
    train()
    added = set(ops.gradient_registry.list()) - before
    assert added
    assert all(name.startswith("Tfmix") for name in added), added


def test_each_entry_says_why():
    for entry in replaced.LIST:
        assert entry.why.endswith("."), entry


@pytest.mark.costly
def test_a_replacement_that_is_not_on_the_list_is_found(
    comparison, monkeypatch
):
    tfmix.set_global_policy("mixed_float16")
    numpy = sys.modules[op_places.BACKEND_OPS.numpy.__name__]
    monkeypatch.setattr(numpy, "sin", lambda x: x)
    monkeypatch.setattr(keras.layers.Dense, "tfmix", print, raising=False)
    names = listed(context.installed.rules)
    assert len(set(comparison.changed()) - set(names)) == 2


def test_float32_from_the_start_touches_nothing():
    global_policy.set_global_policy("float32")
    hooked, compiled = keras.Layer.__init__, keras.Model.compile
    global_policy.set_global_policy("float32")
    assert not global_policy.hooks_keras()
    assert not replacing.replaced()
    assert (keras.Layer.__init__, keras.Model.compile) == (hooked, compiled)


@pytest.mark.costly
def test_the_layer_constructor_keeps_its_signature():
    before = keras.Layer.__init__
    arguments = inspect.getfullargspec(before)
    global_policy.set_global_policy("mixed_float16")
    assert keras.Layer.__init__ is not before
    assert keras.Layer.__init__.__wrapped__ is before
    assert inspect.getfullargspec(keras.Layer.__init__) == arguments


def test_code_that_hooks_on_top_of_us_keeps_its_hook():
    global_policy.set_global_policy("mixed_float16")
    ours = keras.Layer.__init__

    def theirs(self, *args, **kwargs):
        ours(self, *args, **kwargs)

    keras.Layer.__init__ = theirs
    try:
        global_policy.set_global_policy("float32")
        assert keras.Layer.__init__ is theirs
        assert keras.layers.Dense(1).compute_dtype == "float32"
    finally:
        keras.Layer.__init__ = ours.__wrapped__


def test_a_keras_without_a_replaced_name_is_left_alone_with_an_error(
    monkeypatch,
):
    owner, name = context.POLICY_STORE
    original, before = getattr(owner, name), replacing.replaced()
    with monkeypatch.context() as patch:
        patch.delattr(keras.Layer, "__init__")
        with pytest.raises(ImportError, match="no '__init__'"):
            replacing.want(replacing.LAYERS, True)
    assert getattr(owner, name) is original
    assert replacing.replaced() == before


def test_a_scope_that_ends_in_an_error_leaves_only_compile(monkeypatch):
    def fail(wanted):
        raise ZeroDivisionError

    before = replacing.replaced()
    assert [name for _, name in before] == ["compile"]
    with pytest.raises(KeyError), global_policy.policy_scope("O2"):
        raise KeyError
    assert replacing.replaced() == before
    with monkeypatch.context() as patch:
        patch.setattr(replacing, "install", fail)
        with pytest.raises(ZeroDivisionError):
            global_policy.policy_scope("O2").__enter__()
    # What ops need stays until the next policy is set.
    replacing.install(())
    assert replacing.replaced() == before


def test_float32_ends_the_watch_and_the_next_policy_begins_it():
    original = keras.Model.compile.__wrapped__
    global_policy.set_global_policy("float32")
    assert keras.Model.compile is original
    assert not replacing.replaced()
    with global_policy.policy_scope("mixed_float16"):
        pass
    assert keras.Model.compile.__wrapped__ is original


IMPORTS = """
import keras
import numpy as np

from tests.autocast import replaced_names

# What Keras and Python set up at the first use.
model = keras.Sequential([keras.layers.Dense(2)])
model.compile("sgd", "mse", metrics=["mae"])
model.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)
owners = replaced_names.owners()
before = replaced_names.snapshot(owners)
assert len(before) > 10_000
import tfmix

def changed():
    places = replaced_names.changed(before, owners)
    return [replaced_names.label(*place) for place in places]

assert all(name.endswith(".Trainer.compile") for name in changed()), changed()
tfmix.set_global_policy("mixed_float16")
assert "keras.src.layers.layer.Layer.__init__" in changed()
tfmix.set_global_policy("float32")
assert not changed(), changed()
"""


@pytest.mark.slow
def test_nothing_of_keras_differs_from_before_the_import(tmp_path):
    done = processes.python("-c", IMPORTS, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
