"""The active policy: process-wide, in scopes, in threads, and removed."""

import contextlib
import importlib.util
import threading

import keras
import pytest

from tests import helpers
from tfmix._keras import context
from tfmix.autocast import global_policy as state
from tfmix.policy import devices
from tfmix.policy import policy as policies

Policy = policies.Policy
SIXTEEN_BIT = ("mixed_float16", "mixed_bfloat16", "float16", "bfloat16")


def new_layer_policy():
    return keras.layers.Dense(1).dtype_policy.name


def in_thread(function):
    """Runs a function in a new thread, and returns its result."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


@pytest.mark.parametrize("name", SIXTEEN_BIT)
def test_new_layers_get_the_global_policy_as_plain_keras(name):
    state.set_global_policy(name)
    layer = keras.layers.Dense(1)
    assert type(layer.dtype_policy) is keras.DTypePolicy
    assert layer.dtype_policy.name == name
    assert type(keras.config.dtype_policy()) is keras.DTypePolicy
    assert state.global_policy() == Policy(name)


@pytest.mark.costly
def test_the_policy_survives_clear_session():
    state.set_global_policy("mixed_float16")
    keras.utils.clear_session()
    assert new_layer_policy() == "mixed_float16"


@pytest.mark.parametrize(
    "policy",
    [
        keras.DTypePolicy("mixed_bfloat16"),
        keras.dtype_policies.DTypePolicyMap("mixed_bfloat16"),
        keras.dtype_policies.QuantizedDTypePolicy("int8", "mixed_bfloat16"),
    ],
)
def test_any_policy_object_of_kerass_is_accepted(policy):
    state.set_global_policy(policy)
    assert state.global_policy() is policy
    layer = keras.layers.Dense(1)
    assert layer.dtype_policy.name == policy.name
    assert layer.compute_dtype == "bfloat16"


@pytest.mark.parametrize("name", ["int8", "bool", "string"])
def test_policy_objects_without_a_float_dtype_are_refused(name):
    with pytest.raises(ValueError, match="must have float dtypes"):
        state.set_global_policy(keras.DTypePolicy(name))


def test_an_error_leaves_the_policy_as_it_was():
    state.set_global_policy("mixed_float16")
    with pytest.raises(ValueError, match="must be one of"):
        state.set_global_policy("fp16")
    with (
        pytest.raises(ValueError, match="must be one of"),
        state.policy_scope("fp16"),
    ):
        pass
    assert new_layer_policy() == "mixed_float16"


def test_a_scope_restores_what_was_there_on_entering():
    scope = state.policy_scope("mixed_float16")
    state.set_global_policy("mixed_bfloat16")
    with scope:
        assert new_layer_policy() == "mixed_float16"
    assert new_layer_policy() == "mixed_bfloat16"


def test_a_scope_decorates_a_function():
    @state.policy_scope("mixed_bfloat16")
    def make():
        return new_layer_policy()

    assert (make(), make(), new_layer_policy()) == (
        "mixed_bfloat16",
        "mixed_bfloat16",
        "float32",
    )


def test_a_global_policy_is_refused_in_a_scope():
    with state.policy_scope("mixed_float16"):
        with pytest.raises(RuntimeError, match="Open another scope inside"):
            state.set_global_policy("mixed_bfloat16")
        assert new_layer_policy() == "mixed_float16"
    assert new_layer_policy() == "float32"
    assert not state.hooks_keras()


def test_scopes_of_threads_that_interleave_restore_their_own():
    # A and B are opened and closed in this order, unlike a stack's.
    entered, left = threading.Event(), threading.Event()
    seen = {}

    def other():
        with state.policy_scope("mixed_bfloat16"):
            entered.set()
            left.wait(10)
            seen["inside"] = new_layer_policy()
        seen["after"] = new_layer_policy()

    thread = threading.Thread(target=other)
    with state.policy_scope("mixed_float16"):
        thread.start()
        entered.wait(10)
        assert new_layer_policy() == "mixed_float16"
    assert new_layer_policy() == "float32"
    left.set()
    thread.join()
    assert seen == {"inside": "mixed_bfloat16", "after": "float32"}
    assert not state.hooks_keras()


def test_float32_holds_against_kerass_own_policy():
    keras.config.set_dtype_policy("mixed_float16")
    with state.policy_scope("float32"):
        assert new_layer_policy() == "float32"
    assert new_layer_policy() == "mixed_float16"
    state.set_global_policy("mixed_bfloat16")
    state.set_global_policy("float32")
    assert not state.hooks_keras()
    assert new_layer_policy() == "float32"


@pytest.mark.parametrize(
    ("name", "warns"),
    [("mixed_bfloat16", True), ("float32", True), ("mixed_float16", False)],
)
def test_setting_a_policy_through_keras_takes_effect_and_warns(
    said, name, warns
):
    state.set_global_policy("mixed_float16")
    for _ in range(2):
        keras.config.set_dtype_policy(name)
        assert new_layer_policy() == name
    assert len(said) == warns
    for line in said:
        assert f"call tfmix.set_global_policy({name!r}) instead" in line
        assert "Policy('mixed_float16')" in line


SETTERS = {
    "config": keras.config.set_dtype_policy,
    "mixed_precision": keras.mixed_precision.set_dtype_policy,
    "global": keras.mixed_precision.set_global_policy,
}


def for_a_moment(name="float32", back=lambda policy: policy, by="config"):
    """Does as packages do that need another policy for a layer of theirs."""
    old = keras.config.dtype_policy()
    SETTERS[by](name)
    assert new_layer_policy() == name
    SETTERS[by](back(old))


@pytest.mark.parametrize("by", SETTERS)
@pytest.mark.parametrize("name", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize(
    "back", [lambda policy: policy, lambda policy: policy.name]
)
@pytest.mark.parametrize("is_scope", [True, False])
def test_a_policy_that_keras_handed_out_comes_back_with_its_rules(
    said, is_scope, back, name, by
):
    policy = Policy("mixed_float16", float32_layers=["head"])
    with contextlib.ExitStack() as scope:
        if is_scope:
            scope.enter_context(state.policy_scope(policy))
        else:
            state.set_global_policy(policy)
        for _ in range(2):
            for_a_moment(name, back, by)
            assert state.global_policy() is policy
            assert keras.layers.Dense(1, name="head").compute_dtype == "float32"
    assert len(said) == 1
    assert state.hooks_keras() != is_scope
    state.set_global_policy("float32")
    assert new_layer_policy() == "float32"


def test_moments_nest_and_meet_scopes():
    policy = Policy("mixed_float16", float32_layers=["head"])
    state.set_global_policy(policy)
    old = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    for_a_moment("float16")
    assert new_layer_policy() == "mixed_bfloat16"
    with state.policy_scope("float32"):
        for_a_moment("float16")
        assert new_layer_policy() == "float32"
    assert new_layer_policy() == "mixed_bfloat16"
    for_a_moment("float32")
    keras.config.set_dtype_policy(old)
    assert state.global_policy() is policy


def test_a_moment_in_one_thread_is_none_in_another():
    state.set_global_policy("mixed_float16")
    keras.config.set_dtype_policy("float32")
    assert in_thread(new_layer_policy) == "mixed_float16"
    in_thread(lambda: keras.config.set_dtype_policy("mixed_bfloat16"))
    assert new_layer_policy() == "float32"


def test_without_a_policy_of_tfmix_kerass_policy_holds():
    keras.config.set_dtype_policy("mixed_bfloat16")
    assert state.global_policy() == keras.DTypePolicy("mixed_bfloat16")


def test_rules_come_and_go_with_the_policy():
    policy = Policy("mixed_float16", float32_ops=["tanh"])
    rules = {"tanh", policies.SIXTEEN_BIT}
    with state.policy_scope(policy):
        assert context.active_rules() == rules
    assert not context.active_rules()
    state.set_global_policy(policy)
    assert context.installed.rules == rules
    state.set_global_policy("float32")
    assert not context.installed.rules


def test_a_float32_scope_has_no_op_rules_of_the_policy_around_it():
    # The squares exceed float16's range, but their root does not.
    x = keras.ops.full((1024,), 300.0, dtype="float16")
    state.set_global_policy("mixed_float16")
    assert float(keras.ops.norm(x)) == 9600.0
    with state.policy_scope("float32"):
        assert float(keras.ops.norm(x)) == float("inf")
    assert float(keras.ops.norm(x)) == 9600.0


@pytest.mark.parametrize("name", ["mixed_float16", "float16", "O2"])
def test_float16_on_a_tpu_is_refused_at_once(monkeypatch, name):
    tpu = devices.describe("TPU", "TPU v5e", "jax")
    monkeypatch.setattr(devices, "devices", lambda: (tpu,))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    with pytest.raises(ValueError, match="float16'.*'mixed_bfloat16'"):
        state.set_global_policy(name)
    state.set_global_policy("mixed_bfloat16")


# TensorFlow's devices are listed without starting them.
@helpers.requires_backend("jax")
def test_without_libtpu_jax_is_not_asked_for_a_tpu(monkeypatch):
    monkeypatch.setattr(devices, "devices", lambda: pytest.fail("asked"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    state.set_global_policy("mixed_float16")
