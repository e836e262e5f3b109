"""Saved state is restored exactly, or refused."""

import copy

import keras
import numpy as np
import pytest

import tfmix
from tests import helpers, steps
from tfmix.loss_scaling import optimizer as optimizers
from tfmix.loss_scaling import rules

pytestmark = pytest.mark.filterwarnings(
    "ignore:The gradients are divided by the loss scale"
)
Wrapped = optimizers.LossScaleOptimizer


def trained(wrapped=None, bad_steps=2):
    """Returns an optimizer in the middle of a growth window."""
    if wrapped is None:
        rule = rules.DynamicLossScale(1024.0, growth_steps=5, hysteresis=3)
        wrapped = Wrapped(keras.optimizers.Adam(0.1), loss_scale=rule)
    step = steps.stepper(wrapped, steps.variables(), steps.MODES[1])
    for seed in range(4):
        step(steps.gradients(seed))
    for seed in range(bad_steps):
        step([np.full_like(g, np.nan) for g in steps.gradients(seed)])
    return wrapped


def test_a_file_says_that_it_needs_tfmix(tmp_path, monkeypatch):
    with tfmix.policy_scope("mixed_float16"):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(Wrapped("adam"), "mse")
    model.optimizer.build(model.trainable_variables)
    model.save(tmp_path / "model.keras")
    load = keras.saving.load_model
    assert type(load(tmp_path / "model.keras").optimizer) is Wrapped
    # Keras has none of these classes in a process that did not import tfmix.
    known = keras.saving.get_custom_objects()
    for name in [*known]:
        if name.startswith("tfmix>"):
            monkeypatch.delitem(known, name)
    with pytest.raises(TypeError, match="^Could not locate.*tfmix>LossScale"):
        load(tmp_path / "model.keras")
    plain = load(tmp_path / "model.keras", compile=False)
    assert plain.layers[0].compute_dtype == "float16"


def fresh(like):
    again = Wrapped.from_config(like.get_config())
    again.build(steps.variables())
    return again


def assert_equal_state(one, two):
    helpers.assert_unchanged(one.variables, helpers.snapshot(two.variables))


def network():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])


@pytest.mark.costly
def test_all_state_is_set_or_none(said):
    source, store = trained(), {}
    target, weights = fresh(source), helpers.snapshot(source.variables)
    target.set_weights(weights)
    assert_equal_state(target, source)
    zeros = [0 * weight for weight in weights]
    with pytest.raises(ValueError, match="Received: 4 arrays"):
        target.set_weights(zeros[:4])
    with pytest.raises(ValueError, match=r"of shape \(7, 7\)"):
        target.set_weights([*zeros[:-1], np.zeros((7, 7), "float32")])
    trained(Wrapped(keras.optimizers.SGD(0.1))).save_own_variables(store)
    target.load_own_variables(store)
    assert "it has 6 variables, and the file" in said[-1]
    assert_equal_state(target, source)
    with pytest.raises(ValueError, match="one array for each"):
        Wrapped("adam").set_weights([])


INNER = {
    "adam": lambda: keras.optimizers.Adam(0.01),
    "masters": lambda: tfmix.optimizers.MasterWeightOptimizer(
        keras.optimizers.Adam(0.01)
    ),
}


@pytest.mark.costly
@pytest.mark.parametrize("inner", INNER)
# Keras warns of every optimizer that was saved before it was built.
@pytest.mark.filterwarnings("ignore:Skipping variable loading:UserWarning")
def test_a_model_saved_before_its_first_step_loads_and_trains(inner, tmp_path):
    with tfmix.policy_scope("float16"):
        model = network()
        model.compile(Wrapped(INNER[inner](), loss_scale=64.0), loss="mse")
    model.save(tmp_path / "new.keras")
    loaded = keras.models.load_model(tmp_path / "new.keras")
    tfmix.guard(loaded)
    before = loaded.get_weights()
    loaded.train_on_batch(np.ones((8, 4), "float32"), np.zeros((8, 1)))
    assert loaded.optimizer.loss_scale == 64.0
    assert int(loaded.optimizer.iterations) == 1
    assert not np.array_equal(before[0], loaded.get_weights()[0])


def test_a_copy_that_is_not_built_keeps_the_scale(said):
    assert copy.deepcopy(Wrapped("adam", 64.0)).loss_scale == 64.0
    assert not said
