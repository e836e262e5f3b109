"""The hooks into Keras exist while a policy is active, and leave no trace."""

import importlib
import inspect
import sys
import types

import keras
import pytest

from tfmix._keras import compile_method, replacements, training
from tfmix.autocast import global_policy


def snapshot():
    """Returns every function, class attribute and global of Keras."""
    found = {}
    for module_name, module in list(sys.modules.items()):
        if module_name.split(".")[0] != "keras" or module is None:
            continue
        for name, value in list(vars(module).items()):
            found[module_name, name] = value
            if isinstance(value, type) and value.__module__ == module_name:
                for attribute, inner in list(vars(value).items()):
                    found[module_name, name, attribute] = inner
    return found


def differences(before, after):
    return [
        key
        for key, value in before.items()
        if key in after and after[key] is not value and is_ours(key, value)
    ]


def is_ours(key, value):
    # Keras itself replaces these with each session or class definition.
    volatile = ("_abc_impl", "GLOBAL_STATE_TRACKER", "GLOBAL_SETTINGS_TRACKER")
    plain = (int, float, str, tuple, types.MappingProxyType)
    return key[-1] not in volatile and not isinstance(value, plain)


def use_everything():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    inputs = keras.ops.ones((4, 3))
    model.train_on_batch(inputs, keras.ops.ones((4, 2)))
    keras.layers.Softmax()(inputs)


@pytest.mark.costly
def test_after_float32_nothing_of_keras_differs():
    use_everything()
    global_policy.set_global_policy("float32")
    before = snapshot()
    for name in ("mixed_float16", "mixed_bfloat16", "float16"):
        global_policy.set_global_policy(name)
        use_everything()
        with global_policy.policy_scope("O2"):
            use_everything()
    assert differences(before, snapshot()), "the comparison sees nothing"
    global_policy.set_global_policy("float32")
    assert not differences(before, snapshot())
    assert not global_policy._hooks.places()


def test_float32_from_the_start_touches_nothing():
    global_policy.set_global_policy("float32")
    before = snapshot()
    global_policy.set_global_policy("float32")
    with global_policy.policy_scope("float32"):
        assert not global_policy.hooks_keras()
    assert not differences(before, snapshot())


def test_two_policies_one_after_the_other_hook_once():
    global_policy.set_global_policy("mixed_float16")
    places = global_policy._hooks.places()
    hooked = keras.Layer.__init__
    global_policy.set_global_policy("mixed_bfloat16")
    assert global_policy._hooks.places() == places
    assert keras.Layer.__init__ is hooked


@pytest.mark.costly
def test_the_layer_constructor_reads_as_before():
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


def test_a_keras_without_what_we_hook_is_named_and_left_alone(monkeypatch):
    module = importlib.import_module("keras.src.backend.common.global_state")
    original = module.get_global_attribute
    with monkeypatch.context() as patch:
        patch.delattr(training.TRAINER, "compile")
        patch.setattr(global_policy, "_hooks", replacements.Replacements())
        with pytest.raises(RuntimeError, match="no 'compile'"):
            global_policy._hook()
    assert module.get_global_attribute is original
    assert not global_policy.hooks_keras()


def test_a_scope_that_ends_in_an_error_leaves_only_the_watch(monkeypatch):
    def fail():
        raise ZeroDivisionError

    with pytest.raises(KeyError), global_policy.policy_scope("O2"):
        raise KeyError
    assert replacements.replaced() == [compile_method.PLACE]
    with monkeypatch.context() as patch:
        patch.setattr(global_policy, "_hook", fail)
        with pytest.raises(ZeroDivisionError):
            global_policy.policy_scope("O2").__enter__()
    assert replacements.replaced() == [compile_method.PLACE]


def test_float32_ends_the_watch_and_the_next_policy_begins_it():
    original = keras.Model.compile.__wrapped__
    global_policy.set_global_policy("float32")
    assert keras.Model.compile is original
    assert not replacements.replaced()
    with global_policy.policy_scope("mixed_float16"):
        pass
    assert keras.Model.compile.__wrapped__ is original
