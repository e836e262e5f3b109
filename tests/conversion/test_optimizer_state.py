"""A conversion of a trained model keeps its optimizer's state."""

import keras
import numpy as np
import pytest

import tfmix
from tests import helpers
from tfmix.conversion import optimizer_state

X = np.random.default_rng(0).normal(size=(32, 6)).astype("float32")
Y = (X[:, :1] > 0).astype("float32")
OPTIMIZERS = {
    "Adam": lambda: keras.optimizers.Adam(0.01),
    "SGD": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.CosineDecay(0.1, 50), momentum=0.9
    ),
    "Nadam": lambda: keras.optimizers.Nadam(0.01, use_ema=True),
    "RMSprop": lambda: keras.optimizers.RMSprop(
        0.01, gradient_accumulation_steps=2
    ),
}


def trained(optimizer="Adam", epochs=2):
    """Returns a small model after some steps of training in float32."""
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(5, activation="tanh"),
            keras.layers.Dense(1),
        ]
    )
    if isinstance(optimizer, str):
        optimizer = OPTIMIZERS[optimizer]()
    model.compile(optimizer, loss="mse")
    return fitted(model, epochs)


def fitted(model, epochs=1):
    model.fit(X, Y, batch_size=16, epochs=epochs, shuffle=False, verbose=0)
    return model


def state_of(model):
    """Returns all numbers by name: slots, counters, float32 weights."""
    state = optimizer_state.take(model)
    named = {
        name if place < 0 else f"{name} {place}": value
        for (_, name, place), value in state.numbers.items()
    }
    named |= {f"weight {n}": v for n, v in enumerate(state.weights)}
    return named


def assert_same(state, other):
    assert state.keys() == other.keys()
    for name in state:
        helpers.assert_same_bits(state[name], other[name])


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("Adam", "bfloat16"),
        pytest.param("SGD", "float16", marks=pytest.mark.slow),
        pytest.param("Nadam", "float16", marks=pytest.mark.slow),
        pytest.param("RMSprop", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_there_and_back_changes_no_bit(name, policy):
    model = trained(name)
    before = state_of(model)
    # The state contains moments, counters and both layers' weights.
    assert any(np.any(value) for key, value in before.items() if " 0" in key)
    report = tfmix.apply_policy(model, policy)
    assert model.layers[0].kernel.dtype == policy
    assert_same(state_of(model), before)
    report.undo()
    assert model.layers[0].kernel.dtype == "float32"
    assert_same(state_of(model), before)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Adam", "SGD"])
def test_weights_trained_in_16_bit_are_kept_on_the_way_back(name):
    model = trained(name)
    steps = int(model.optimizer.iterations.numpy())
    report = tfmix.apply_policy(model, "bfloat16")
    fitted(model)
    inside = state_of(model)
    assert inside["_iterations"] == steps + 2
    report.undo()
    assert type(model.optimizer).__name__ == name
    assert_same(state_of(model), inside)
    fitted(model)
    assert model.optimizer.iterations.numpy() == steps + 4


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
    fitted(model)
    inside = state_of(model)
    assert inside["_iterations"] == before["_iterations"] + 2
    report.undo()
    assert_same(state_of(model), inside)
    fitted(model)


@pytest.mark.slow
def test_a_pure_model_continues_in_float32_where_it_was():
    with tfmix.policy_scope("bfloat16"):
        model = trained()
    inside = state_of(model)
    assert inside["_iterations"] == 4
    tfmix.apply_policy(model, "float32")
    assert model.layers[0].kernel.dtype == "float32"
    assert_same(state_of(model), inside)
    fitted(model)
    assert model.optimizer.iterations.numpy() == 6


@pytest.mark.slow
def test_mixed_precision_and_back_keeps_the_optimizer_itself():
    model = trained()
    optimizer = model.optimizer
    report = tfmix.apply_policy(model, "mixed_bfloat16")
    fitted(model)
    report.undo()
    assert model.optimizer is optimizer
    assert optimizer.iterations.numpy() == 6
    fitted(model)


def test_another_kind_of_optimizer_starts_from_zero_with_a_warning(caplog):
    model = trained()
    state = optimizer_state.take(model)
    weights = model.get_weights()
    model.compile("sgd", loss="mse")
    optimizer_state.give(model, state)
    assert "SGD cannot continue with the optimizer state of Adam" in caplog.text
    assert model.optimizer.iterations.numpy() == 0
    for one, other in zip(model.get_weights(), weights, strict=True):
        helpers.assert_same_bits(one, other)


def test_a_missing_slot_is_never_filled_with_another(caplog):
    with_momentum = keras.optimizers.SGD(0.1, momentum=0.9)
    model = trained(with_momentum)
    state = optimizer_state.take(model)
    model.compile(keras.optimizers.SGD(0.1), loss="mse")
    optimizer_state.give(model, state)
    assert "SGD cannot continue with the optimizer state of SGD" in caplog.text
    plain = optimizer_state.take(model)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss="mse")
    optimizer_state.give(model, plain)
    for slot in model.optimizer.momentums:
        assert not np.any(slot.numpy())
    fitted(model)


def test_nested_optimizers_keep_all_their_state():
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        pytest.skip("Keras 3.12 has no MultiOptimizer")
    chosen = keras.optimizers.OptimizerMap(keras.optimizers.Adam(0.01))
    chosen[".*bias"] = keras.optimizers.SGD(0.1, momentum=0.9)
    model = trained(keras.optimizers.MultiOptimizer(chosen))
    before = optimizer_state.take(model)
    assert any("momentums" in name for _, name, _ in before.numbers)
    report = tfmix.apply_policy(model, "bfloat16")
    inside = optimizer_state.take(model)
    assert_same(inside.numbers, before.numbers)
    fitted(model)
    report.undo()
    fitted(model)


def test_there_is_no_state_before_the_first_step():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    assert optimizer_state.take(model) is None
    model.compile("adam", loss="mse")
    assert optimizer_state.take(model) is None
    optimizer_state.give(model, None)
    report = tfmix.apply_policy(model, "bfloat16")
    report.undo()
    fitted(model)
