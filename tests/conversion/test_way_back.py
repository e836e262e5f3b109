"""A conversion happens as a whole or not at all, keeps state, and is undone."""

import keras
import numpy as np
import pytest

import tfmix
from tests import helpers
from tfmix._keras import (
    compile_method,
    layer_policies,
    variables,
)
from tfmix.autocast import compile_optimizer
from tfmix.autocast import record as mixed_model
from tfmix.conversion import convert, layer_changes, optimizer_state
from tfmix.loss_scaling import optimizer as scaling
from tfmix.loss_scaling import rules
from tfmix.step import guard

X = np.random.default_rng(0).normal(size=(32, 6)).astype("float32")
Y = X[:, :1] * 0.5
# Tracing would take longer than a few eager steps of such a small model. JAX
# has to compile.
EAGERLY = keras.backend.backend() == "tensorflow"
OPTIMIZERS = {
    "Adam": lambda: keras.optimizers.Adam(0.01),
    "AdamW": lambda: keras.optimizers.AdamW(0.02, weight_decay=0.01),
    "SGD": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.CosineDecay(0.1, 50), momentum=0.9
    ),
    "Nadam": lambda: keras.optimizers.Nadam(0.01, use_ema=True),
    "RMSprop": lambda: keras.optimizers.RMSprop(
        0.01, gradient_accumulation_steps=2
    ),
}


def small_model():
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(5, activation="tanh", name="body"),
            keras.layers.Dense(1, name="head"),
        ]
    )


def compiled(optimizer="AdamW", model=None):
    model = model or small_model()
    if isinstance(optimizer, str):
        optimizer = OPTIMIZERS[optimizer]()
    model.compile(optimizer, "mse", jit_compile=False, run_eagerly=EAGERLY)
    return model


def losses(model, epochs=1):
    """Trains for two steps an epoch; returns the losses."""
    history = model.fit(
        X, Y, batch_size=16, epochs=epochs, shuffle=False, verbose=0
    )
    return history.history["loss"]


def trained(optimizer="Adam"):
    """Returns a model after four steps."""
    model = compiled(optimizer)
    losses(model, 2)
    return model


def body(model):
    return model.get_layer("body")


def steps_of(optimizer):
    return int(helpers.to_numpy(optimizer.iterations))


def assert_float32(model):
    for layer in model._flatten_layers():
        assert layer.compute_dtype == layer.variable_dtype == "float32"
    assert {v.dtype for v in model.variables if "seed" not in v.path} == {
        "float32"
    }


STAGES = [
    (layer_policies, "set_policy", 2),
    (variables, "cast_in_place", 2),
    (layer_changes, "_set_spec", 2),
    (mixed_model, "set_policy", 1),
    (compile_optimizer, "choose", 1),
    (compile_method, "adopt_optimizer", 1),
    (optimizer_state, "give", 1),
    (guard, "attach", 1),
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
        losses(each)
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
    assert_float32(model)
    assert model.optimizer is optimizer
    helpers.assert_unchanged(model.variables + optimizer.variables, weights)
    traced = {"train_function", "test_function", "predict_function"}
    for x in model._flatten_layers():
        before, after = attributes[id(x)], vars(x)
        assert after.keys() == before.keys()
        for key in before.keys() - traced - {"_inbound_nodes"}:
            assert after[key] is before[key] or after[key] == before[key], key
    assert losses(model, 2) == losses(twin, 2)


def test_conversions_are_undone_in_reverse_order_and_once():
    model = compiled()
    first = convert.apply_policy(model, "mixed_float16")
    second = convert.apply_policy(model, "bfloat16")
    with pytest.raises(RuntimeError, match="Undo the later one first"):
        first.undo()
    assert body(model).kernel.dtype == "bfloat16"
    second.undo()
    assert body(model).compute_dtype == "float16"
    first.undo()
    assert_float32(model)
    with pytest.raises(RuntimeError, match="undone already"):
        first.undo()


@pytest.mark.filterwarnings("ignore:.* does not have a .quantize. method")
def test_a_conversion_is_not_undone_over_a_quantization():
    with tfmix.policy_scope("mixed_float16"):
        model = small_model()
    report = convert.apply_policy(model, "float32")
    model.quantize("int8")
    before = model.predict(X, verbose=0)
    with pytest.raises(RuntimeError, match="'body' was quantized after"):
        report.undo()
    np.testing.assert_array_equal(model.predict(X, verbose=0), before)


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
    assert_float32(model)


def test_undoing_prepare_brings_the_first_optimizer_back():
    model = compiled()
    optimizer = model.optimizer
    losses(model)
    _, given, report = convert.prepare(
        model, OPTIMIZERS["AdamW"](), "mixed_float16"
    )
    assert model.optimizer is given
    losses(model)
    report.undo()
    assert model.optimizer is optimizer
    losses(model)


def test_variables_created_later_in_16_bit_come_back_to_float32():
    model = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(1)])
    report = convert.apply_policy(model, "bfloat16")
    model(X)
    assert model.layers[0].kernel.dtype == "bfloat16"
    report.undo()
    assert_float32(model)


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
    wrapper = scaling.LossScaleOptimizer(OPTIMIZERS["AdamW"]())
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
    model = small_model()
    optimizer = keras.optimizers.AdamW(0.0, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_list=[body(model).kernel])
    compiled(optimizer, model)
    if built:
        optimizer.build(model.trainable_variables)
    before = helpers.to_numpy(body(model).kernel)
    # With such a small learning rate, only weight decay changes a weight.
    optimizer.learning_rate = 1e-6
    optimizer.weight_decay = 1e5
    report = convert.apply_policy(model, "bfloat16")
    losses(model)
    report.undo()
    losses(model)
    after = helpers.to_numpy(body(model).kernel)
    np.testing.assert_allclose(after, before, atol=0.02)
    head = helpers.to_numpy(model.get_layer("head").kernel)
    assert np.abs(head).max() < 0.8 * np.abs(before).max()


def test_layers_unfrozen_since_train_after_undo():
    model = small_model()
    body(model).trainable = False
    compiled(model=model)
    losses(model)
    report = convert.apply_policy(model, "float16")
    losses(model)
    body(model).trainable = True
    mine = OPTIMIZERS["AdamW"]()
    compiled(mine, model)
    losses(model)
    report.undo()
    assert_float32(model)
    assert model.optimizer is mine
    before = helpers.to_numpy(body(model).kernel)
    losses(model)
    assert (helpers.to_numpy(body(model).kernel) != before).any()
    assert int(mine.iterations) == 4


def state_of(model):
    """Returns all numbers by name: slots, counters, float32 weights."""
    state = optimizer_state.take(model)
    named = {
        name if place < 0 else f"{name} {place}": value
        for (_, name, place), value in state.numbers.items()
    }
    return named | {f"weight {n}": v for n, v in enumerate(state.weights)}


def assert_same(state, other):
    assert state.keys() == other.keys()
    for name in state:
        helpers.assert_same_bits(state[name], other[name])


def converted(model, policies):
    """Converts a model several times; returns what undoes all of it."""
    before, reports = state_of(model), []
    for policy in policies:
        reports.append(convert.apply_policy(model, policy))
        dtype = tfmix.Policy(policy).variable_dtype
        assert body(model).kernel.dtype == dtype
        assert_same(state_of(model), before)

    def undo():
        for report in reversed(reports):
            report.undo()

    return undo


@pytest.mark.parametrize(
    ("name", "made", "policies"),
    [
        ("Adam", "float32", ["bfloat16"]),
        ("Adam", "float32", ["mixed_float16", "float16"]),
        ("Adam", "float32", ["float16", "bfloat16"]),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                ("Adam", "bfloat16", ["float32"]),
                ("SGD", "float32", ["float16"]),
                ("Nadam", "float32", ["float16"]),
                ("RMSprop", "float32", ["bfloat16"]),
            )
        ),
    ],
)
def test_weights_moments_and_counters_keep_every_bit(name, made, policies):
    with tfmix.policy_scope(made):
        model = trained(name)
    before = state_of(model)
    # The state contains moments, counters and both layers' weights.
    assert any(np.any(value) for key, value in before.items() if " 0" in key)
    converted(model, policies)()
    assert body(model).kernel.dtype == made
    assert_same(state_of(model), before)
    steps = steps_of(model.optimizer)
    undo = converted(model, policies)
    # Training between the conversions is not undone.
    losses(model)
    inside = state_of(model)
    undo()
    assert_same(state_of(model), inside)
    losses(model)
    # They are as many steps as before, also if they accumulate gradients.
    assert steps_of(model.optimizer) == 2 * steps


def test_flat_masters_keep_the_state_in_both_directions():
    model = trained()
    state = optimizer_state.take(model)
    before = state_of(model)
    fresh = keras.optimizers.Adam.from_config(model.optimizer.get_config())
    flat = tfmix.optimizers.MasterWeightOptimizer(fresh, flat=True)
    optimizer = tfmix.LossScaleOptimizer(flat)
    report = tfmix.prepare(model, optimizer, "float16").report
    optimizer_state.give(model, state)
    assert model.optimizer is optimizer
    assert_same(state_of(model), before)
    losses(model)
    inside = state_of(model)
    assert inside["_iterations"] == before["_iterations"] + 2
    report.undo()
    assert_same(state_of(model), inside)
    losses(model)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"momentum": 0.9}, {}),
        # A missing slot is never filled with another.
        ({}, {"momentum": 0.9}),
        ("Adam", {}),
    ],
)
def test_another_kind_of_optimizer_starts_from_zero_with_a_warning(
    first, second, caplog
):
    one, other = (
        each if isinstance(each, str) else keras.optimizers.SGD(0.1, **each)
        for each in (first, second)
    )
    model = trained(one)
    state, weights = optimizer_state.take(model), model.get_weights()
    compiled(other, model)
    optimizer_state.give(model, state)
    assert "SGD cannot continue with the optimizer state of" in caplog.text
    assert steps_of(other) == 0
    assert not any(np.any(slot.numpy()) for slot in other.momentums)
    helpers.assert_unchanged(model.weights, weights)
    losses(model)


def test_nested_optimizers_keep_all_their_state():
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        pytest.skip("Keras 3.12 has no MultiOptimizer")
    chosen = keras.optimizers.OptimizerMap(keras.optimizers.Adam(0.01))
    chosen[".*bias"] = keras.optimizers.SGD(0.1, momentum=0.9)
    model = trained(keras.optimizers.MultiOptimizer(chosen))
    before = optimizer_state.take(model)
    assert any("momentums" in name for _, name, _ in before.numbers)
    report = tfmix.apply_policy(model, "bfloat16")
    assert_same(optimizer_state.take(model).numbers, before.numbers)
    losses(model)
    report.undo()
    losses(model)


def test_there_is_no_state_before_the_first_step():
    model = small_model()
    assert optimizer_state.take(model) is None
    compiled("Adam", model)
    assert optimizer_state.take(model) is None
    optimizer_state.give(model, None)
    report = tfmix.apply_policy(model, "bfloat16")
    report.undo()
    losses(model)


def normalized(*nested):
    """Returns a model that normalizes a feature near 2000."""
    norm, last = keras.layers.LayerNormalization(), keras.layers.Dense(4)
    parts = [keras.Sequential([norm, last])] if nested else [norm, last]
    offset = keras.layers.Rescaling(1.0, 2000.0)
    return keras.Sequential([keras.Input((6,)), offset, *parts])


@pytest.mark.costly
def test_a_model_in_another_passes_float32_on_after_its_conversion(tmp_path):
    # Under Keras's own policy, the inner model rounds its inputs.
    keras.config.set_dtype_policy("mixed_float16")
    model = normalized("nested")
    keras.config.set_dtype_policy("float32")
    rounded = model.predict(X, verbose=0)
    report = convert.apply_policy(model, "float32")
    plain = normalized()
    plain.set_weights(model.get_weights())
    expected = plain.predict(X, verbose=0)
    model.save(tmp_path / "converted.keras")
    loaded = keras.saving.load_model(tmp_path / "converted.keras")
    for each in (model, loaded):
        found = each.predict(X, verbose=0)
        helpers.assert_close(found, expected, "float32")
    report.undo()
    # A feature of 2000 keeps no decimal place in float16.
    assert np.abs(rounded - expected).max() > 0.01
    helpers.assert_same_bits(model.predict(X, verbose=0), rounded)
