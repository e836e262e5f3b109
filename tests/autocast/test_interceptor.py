"""All that is replaced in Keras for the process is counted and restored.

The registry lists what tfmix has replaced. The comparison checks every
attribute of every module and class of Keras without it.
"""

import inspect
import re
import sys

import keras
import numpy as np
import pytest

import tfmix
from tests.tree import ROOT
from tfmix._keras import op_places, replacements, scalars
from tfmix.optimizers import sixteen_bit_optimizer


def registered():
    """Returns `owner.attribute` for all registered replacements."""
    return sorted(label(owner, name) for owner, name in replacements.replaced())


def label(owner, attribute):
    parent = f"{owner.__module__}." if inspect.isclass(owner) else ""
    return f"{parent}{owner.__name__}.{attribute}"


def owners():
    """Returns every module of `keras`, every class in them, and a few more.

    tfmix's own wrappers have an `apply` beside that of Keras's optimizers.
    TensorFlow has a module for custom gradients, and tensors have operators.
    """
    modules = [
        module
        for name, module in list(sys.modules.items())
        if name.split(".")[0] == "keras" and inspect.ismodule(module)
    ]
    classes = {
        id(value): value
        for module in modules
        for value in list(vars(module).values())
        if inspect.isclass(value) and value.__module__.startswith("keras")
    }
    wrapper = sixteen_bit_optimizer.SixteenBitOptimizer
    gradients = sys.modules["tensorflow.python.ops.custom_gradient"]
    backends = dict.fromkeys(owner for owner, _ in scalars.PLACES)
    beside = {id(owner): owner for owner in (wrapper, gradients, *backends)}
    return [*modules, *classes.values(), *beside.values()]


def snapshot(everything):
    return {
        label(owner, name): value
        for owner in everything
        for name, value in list(vars(owner).items())
        # Python creates these on first use.
        if name not in ("__annotations__", "__warningregistry__")
    }


def changed(before, after):
    """Returns the labels whose value is another object, new or gone."""
    missing = object()
    return sorted(
        place
        for place in before.keys() | after.keys()
        if before.get(place, missing) is not after.get(place, missing)
    )


@pytest.fixture
def everything():
    tfmix.set_global_policy("float32")
    train()
    yield owners()
    tfmix.set_global_policy("float32")


def train():
    """Makes Keras import and cache everything that it does on first use."""
    model = keras.Sequential([keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    model.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)


def test_the_guide_says_how_many_names_are_replaced(everything):
    before = snapshot(everything)
    tfmix.set_global_policy("mixed_float16")
    train()
    found = changed(before, snapshot(everything))
    page = (ROOT / "docs/how-it-works.md").read_text("utf-8")
    counts = re.search(r"(\d+) under TensorFlow, (\d+) under\s+JAX", page)
    of_backend = dict(zip(["tensorflow", "jax"], counts.groups(), strict=True))
    # `import tfmix` has replaced `compile` before.
    expected = int(of_backend[keras.backend.backend()])
    assert len(registered()) == expected, "\n".join(found)


@pytest.mark.costly
@pytest.mark.parametrize("policy", ["mixed_float16", "bfloat16", "O1"])
def test_the_registry_lists_exactly_what_is_replaced(everything, policy):
    before = snapshot(everything)
    tfmix.set_global_policy(policy)
    found = changed(before, snapshot(everything))
    assert found
    assert registered() == found


@pytest.mark.costly
def test_float32_leaves_nothing_replaced(everything):
    before = snapshot(everything)
    for policy in ("mixed_float16", "mixed_bfloat16", "float16"):
        tfmix.set_global_policy(policy)
        train()
        with tfmix.policy_scope("O2"):
            train()
    assert registered()
    tfmix.set_global_policy("float32")
    assert changed(before, snapshot(everything)) == []
    assert registered() == []


@pytest.mark.costly
def test_a_replacement_that_is_not_registered_is_found(everything, monkeypatch):
    before = snapshot(everything)
    tfmix.set_global_policy("mixed_float16")
    numpy = sys.modules[op_places.BACKEND_OPS.numpy.__name__]
    monkeypatch.setattr(numpy, "sin", lambda x: x)
    monkeypatch.setattr(keras.layers.Dense, "tfmix", 1, raising=False)
    found = changed(before, snapshot(everything))
    assert len(set(found) - set(registered())) == 2
