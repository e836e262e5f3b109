"""A conversion happens as a whole or not at all, and can be undone."""

import keras
import numpy as np
import pytest

from tests import helpers
from tests.conversion import test_orders as small
from tfmix._keras import (
    compile_method,
    layer_policies,
    variables,
)
from tfmix.autocast import compile_optimizer
from tfmix.autocast import model as mixed_model
from tfmix.conversion import convert, layer_changes, optimizer_state
from tfmix.loss_scaling import optimizer as scaling
from tfmix.loss_scaling import rules, train_step_guard
from tfmix.optimizers import master_weights


def adam():
    return keras.optimizers.AdamW(0.02, weight_decay=0.01)


def compiled(optimizer=None):
    return small.compiled(small.small_model(), optimizer or adam())


def body(model):
    return model.get_layer("body")


STAGES = [
    (layer_policies, "set_policy", 2),
    (variables, "cast_in_place", 2),
    (layer_changes, "_set_spec", 2),
    (mixed_model, "set_policy", 1),
    (compile_optimizer, "choose", 1),
    (compile_method, "adopt_optimizer", 1),
    (optimizer_state, "give", 1),
    (train_step_guard, "attach", 1),
    (layer_changes, "forget_compiled", 1),
]


@pytest.mark.costly
@pytest.mark.parametrize(
    ("module", "name", "call"), STAGES, ids=[stage[1] for stage in STAGES]
)
def test_a_conversion_that_fails_leaves_the_model_as_it_was(
    monkeypatch, module, name, call
):
    model, twin = compiled(), compiled()
    twin.set_weights(model.get_weights())
    for each in (model, twin):
        small.losses(each)
    optimizer = model.optimizer
    attributes = {id(x): dict(vars(x)) for x in model._flatten_layers()}
    weights = helpers.snapshot(model.variables + optimizer.variables)
    original, calls = getattr(module, name), []

    def fails_once(*args, **kwargs):
        calls.append(args)
        if len(calls) == call:
            raise ZeroDivisionError(name)
        return original(*args, **kwargs)

    monkeypatch.setattr(module, name, fails_once)
    with pytest.raises(ZeroDivisionError, match=name):
        convert.apply_policy(model, "float16")
    monkeypatch.undo()
    small.assert_float32(model)
    assert model.optimizer is optimizer
    helpers.assert_unchanged(model.variables + optimizer.variables, weights)
    traced = {"train_function", "test_function", "predict_function"}
    for x in model._flatten_layers():
        before, after = attributes[id(x)], vars(x)
        assert after.keys() == before.keys()
        for key in before.keys() - traced - {"_inbound_nodes"}:
            assert after[key] is before[key] or after[key] == before[key], key
    assert small.losses(model, 2) == small.losses(twin, 2)


def test_undoing_the_first_of_two_conversions_is_refused():
    model = compiled()
    first = convert.apply_policy(model, "mixed_float16")
    second = convert.apply_policy(model, "bfloat16")
    with pytest.raises(RuntimeError, match="Undo the later one first"):
        first.undo()
    assert body(model).kernel.dtype == "bfloat16"
    second.undo()
    first.undo()
    small.assert_float32(model)


def test_undoing_a_whole_whose_part_was_converted_again_is_refused():
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.Sequential([keras.layers.Dense(5), keras.layers.Dense(4)]),
            keras.layers.Dense(1),
        ]
    )
    whole = convert.apply_policy(model, "mixed_float16")
    part = convert.apply_policy(model.layers[0], "mixed_bfloat16")
    with pytest.raises(RuntimeError, match="a part of it, was converted"):
        whole.undo()
    part.undo()
    whole.undo()
    small.assert_float32(model)


def test_an_optimizer_first_used_on_masters_comes_back():
    model = compiled()
    optimizer = model.optimizer
    report = convert.apply_policy(model, "float16")
    small.losses(model)
    moments = helpers.snapshot(optimizer.variables)
    report.undo()
    assert model.optimizer is optimizer
    helpers.assert_unchanged(optimizer.variables, moments)
    before = small.losses(model)[0]
    assert small.losses(model, 4)[-1] < before
    assert int(optimizer.iterations) == 12


def test_undoing_prepare_brings_the_first_optimizer_back():
    model = compiled()
    optimizer = model.optimizer
    small.losses(model)
    _, given, report = convert.prepare(model, adam(), "mixed_float16")
    assert model.optimizer is given
    small.losses(model)
    report.undo()
    assert model.optimizer is optimizer
    small.losses(model)


def test_variables_created_later_in_16_bit_come_back_to_float32():
    model = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(1)])
    report = convert.apply_policy(model, "bfloat16")
    model(small.X)
    assert model.layers[0].kernel.dtype == "bfloat16"
    report.undo()
    small.assert_float32(model)


@pytest.mark.parametrize(
    ("first", "second"), [("mixed_float16", "float16"), ("float16", "bfloat16")]
)
def test_moments_survive_two_conversions_and_masters_are_trained(first, second):
    model = compiled()
    small.losses(model)
    before = optimizer_state.take(model).numbers
    convert.apply_policy(model, first)
    convert.apply_policy(model, second)
    after = optimizer_state.take(model).numbers
    assert after.keys() == before.keys()
    for name in before:
        helpers.assert_same_bits(after[name], before[name])
    assert body(model).kernel.dtype == second
    inner = model.optimizer
    inner = getattr(inner, "inner_optimizer", inner)
    if second == "float16":
        assert type(inner) is master_weights.MasterWeightOptimizer
    small.losses(model)
    assert int(model.optimizer.iterations) == 4


def test_the_wrapper_of_tfmix_goes_with_the_last_16_bit_layer():
    model = compiled()
    optimizer = model.optimizer
    convert.apply_policy(model, "mixed_float16")
    wrapper = model.optimizer
    convert.apply_policy(model, "mixed_float16")
    assert model.optimizer is wrapper, "the loss scale was reset"
    convert.apply_policy(model, "mixed_bfloat16")
    assert model.optimizer.rule == rules.NoLossScale()
    convert.apply_policy(model, "float32")
    assert model.optimizer is optimizer


def test_the_users_wrapper_stays():
    wrapper = scaling.LossScaleOptimizer(adam())
    model = compiled(wrapper)
    report = convert.apply_policy(model, "mixed_float16")
    convert.apply_policy(model, "mixed_bfloat16").undo()
    assert model.optimizer is wrapper
    report.undo()
    assert model.optimizer is wrapper


def test_a_fixed_factor_is_restored():
    optimizer = keras.optimizers.SGD(0.05, loss_scale_factor=64.0)
    model = compiled(optimizer)
    report = convert.apply_policy(model, "mixed_float16")
    assert model.optimizer.loss_scale == 64.0
    assert optimizer.loss_scale_factor is None
    report.undo()
    assert model.optimizer is optimizer
    assert optimizer.loss_scale_factor == 64.0


@pytest.mark.costly
@pytest.mark.parametrize("built", [True, False])
def test_excluded_variables_keep_no_weight_decay_after_undo(built):
    model = small.small_model()
    optimizer = keras.optimizers.AdamW(0.0, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_list=[body(model).kernel])
    small.compiled(model, optimizer)
    if built:
        optimizer.build(model.trainable_variables)
    before = helpers.to_numpy(body(model).kernel)
    # With such a small learning rate, only weight decay changes a weight.
    optimizer.learning_rate = 1e-6
    optimizer.weight_decay = 1e5
    report = convert.apply_policy(model, "bfloat16")
    small.losses(model)
    report.undo()
    small.losses(model)
    after = helpers.to_numpy(body(model).kernel)
    np.testing.assert_allclose(after, before, atol=0.02)
    head = helpers.to_numpy(model.get_layer("head").kernel)
    assert np.abs(head).max() < 0.8 * np.abs(before).max()


def test_layers_unfrozen_since_train_after_undo():
    model = small.small_model()
    body(model).trainable = False
    small.compiled(model, adam())
    small.losses(model)
    report = convert.apply_policy(model, "float16")
    small.losses(model)
    body(model).trainable = True
    mine = adam()
    small.compiled(model, mine)
    small.losses(model)
    report.undo()
    small.assert_float32(model)
    assert model.optimizer is mine
    before = helpers.to_numpy(body(model).kernel)
    small.losses(model)
    assert (helpers.to_numpy(body(model).kernel) != before).any()
    assert int(mine.iterations) == 4
