"""The hooks into Keras exist while a policy is active, and leave no trace."""

import inspect

import keras
import pytest

from tfmix._keras import (
    compile_method,
    global_state,
    replacements,
    training,
)
from tfmix.autocast import global_policy


def test_float32_from_the_start_touches_nothing():
    global_policy.set_global_policy("float32")
    hooked, compiled = keras.Layer.__init__, keras.Model.compile
    global_policy.set_global_policy("float32")
    with global_policy.policy_scope("float32"):
        assert not global_policy.hooks_keras()
    assert not replacements.replaced()
    assert (keras.Layer.__init__, keras.Model.compile) == (hooked, compiled)


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
    owner, name = global_state.POLICY_STORE
    original = getattr(owner, name)
    with monkeypatch.context() as patch:
        patch.delattr(training.TRAINER, "compile")
        patch.setattr(global_policy, "_hooks", replacements.Replacements())
        with pytest.raises(RuntimeError, match="no 'compile'"):
            global_policy._hook()
    assert getattr(owner, name) is original
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
