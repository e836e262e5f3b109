"""Loss scales are pure rules: settings are fixed, and the state is passed."""

import copy
import dataclasses
import math
import pickle

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import ops

from tfmix.loss_scaling import rules

pytestmark = pytest.mark.every_case("each row is a rule of its own, and fast")

UNUSUAL = {
    "initial_scale": 512.0,
    "growth_factor": 4.0,
    "backoff_factor": 0.25,
    "growth_steps": 7,
    "hysteresis": 3,
    "min_scale": 0.125,
    "max_scale": 2.0**20,
}
RULES = [
    rules.DynamicLossScale(**UNUSUAL),
    rules.FixedLossScale(scale=1000.0),
    rules.NoLossScale(),
]


def run(rule, outcomes, state=None):
    """Returns the scale after each outcome."""
    state = rule.init() if state is None else state
    scales = []
    for finite in outcomes:
        state = rule.update(state, finite)
        scales.append(float(rule.current(state)))
    return scales


def test_the_default_scales_are_those_of_the_seed_systems():
    assert rules.DynamicLossScale() == rules.DynamicLossScale(2.0**15)
    # MXNet's and MindSpore's fixed scale.
    assert rules.FixedLossScale().scale == 128.0


@pytest.mark.parametrize(
    ("stored", "healed"),
    [
        (0.0, 2.0),
        (-4.0, 2.0),
        (1e-44, 2.0),
        (math.inf, 1024.0),
        (-math.inf, 2.0),
        (math.nan, 1024.0),
        (128.0, 128.0),
    ],
)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_dynamic_scale_recovers_from_any_stored_value(
    stored, healed, as_tensor
):
    rule = rules.DynamicLossScale(64.0, min_scale=2.0, max_scale=1024.0)
    value = np.float32(stored)
    state = rule.init()._replace(
        scale=ops.convert_to_tensor(value) if as_tensor else value
    )
    assert float(rule.current(state)) == healed
    assert run(rule, [True], state) == [healed]
    assert run(rule, [False], state) == [max(healed / 2, 2.0)]


def test_a_growth_factor_near_one_grows_log_additively():
    # NNabla's alternative scaler adds 0.001 in log2 for every good step.
    growth = {"growth_factor": 2.0**0.001, "growth_steps": 1}
    scale = run(rules.DynamicLossScale(1024.0, **growth), [True] * 1000)[-1]
    assert math.log2(scale) == pytest.approx(11.0, abs=1e-3)


class Oracle:
    """The dynamic rule in plain Python, written independently of it."""

    def __init__(self, scale, window, patience, growth, backoff):
        self.scale, self.window, self.patience = scale, window, patience
        self.growth, self.backoff = growth, backoff
        self.calm = self.storm = 0

    def step(self, finite):
        if finite:
            self.storm, self.calm = 0, self.calm + 1
            if self.calm == self.window:
                self.calm, self.scale = 0, min(self.scale * self.growth, 64.0)
        else:
            self.calm, self.storm = 0, self.storm + 1
            if self.storm >= self.patience:
                self.scale = max(self.scale * self.backoff, 1.0)
        return self.scale


@settings(max_examples=300, deadline=None)
@given(
    outcomes=st.lists(st.booleans(), max_size=60),
    exponent=st.integers(0, 6),
    window=st.integers(1, 6),
    patience=st.integers(1, 4),
    growth=st.sampled_from([2.0, 4.0]),
    backoff=st.sampled_from([0.5, 0.25]),
)
def test_random_sequences_follow_the_oracle(
    outcomes, exponent, window, patience, growth, backoff
):
    initial = 2.0**exponent
    rule = rules.DynamicLossScale(
        initial,
        growth_factor=growth,
        backoff_factor=backoff,
        growth_steps=window,
        hysteresis=patience,
        min_scale=1.0,
        max_scale=64.0,
    )
    oracle = Oracle(initial, window, patience, growth, backoff)
    assert run(rule, outcomes) == [oracle.step(finite) for finite in outcomes]


def test_tensors_and_numbers_take_the_same_path():
    rule = rules.DynamicLossScale(8.0, growth_steps=2, hysteresis=2)
    rng = np.random.default_rng(1)
    outcomes = [bool(finite) for finite in rng.random(40) < 0.6]
    state = type(rule.init())(*map(ops.convert_to_tensor, rule.init()))
    tensors = [ops.convert_to_tensor(finite) for finite in outcomes]
    assert run(rule, tensors, state) == run(rule, outcomes)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_rules_are_frozen_and_survive_config_copy_and_pickle(rule):
    serialized = keras.saving.serialize_keras_object(rule)
    assert keras.saving.deserialize_keras_object(serialized) == rule
    assert copy.deepcopy(rule) == pickle.loads(pickle.dumps(rule)) == rule
    with pytest.raises(dataclasses.FrozenInstanceError):
        rule.anything = 1


def test_no_unusual_value_is_a_default():
    defaults = dataclasses.asdict(rules.DynamicLossScale())
    assert set(defaults) == set(UNUSUAL)
    assert not set(defaults.items()) & set(UNUSUAL.items())


@pytest.mark.parametrize("stored", [0.0, math.nan, math.inf, 3.0])
def test_a_fixed_scale_stays_whatever_happened(stored):
    rule = rules.FixedLossScale(512.0)
    state = rule.init()._replace(scale=np.float32(stored))
    assert float(rule.current(state)) == 512.0
    assert run(rule, [True, False, False], state) == [512.0] * 3


def test_the_base_class_repairs_the_state_of_a_users_rule():
    class Square(rules.LossScale):
        def init(self):
            return rules.LossScaleState(np.float32(16.0))

        def update(self, state, finite):
            return state._replace(scale=self.current(state) * 2)

    for stored in (0.0, -1.0, math.inf, math.nan):
        state = Square().init()._replace(scale=np.float32(stored))
        assert float(Square().current(state)) == 16.0


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"initial_scale": -1.0}, ValueError, "initial_scale=-1.0"),
        ({"initial_scale": math.inf}, ValueError, "initial_scale=inf"),
        ({"initial_scale": "big"}, TypeError, "initial_scale='big'"),
        ({"initial_scale": True}, TypeError, "must be a number"),
        ({"initial_scale": 2.0**30}, ValueError, "Move the bound"),
        ({"growth_steps": 0}, ValueError, "growth_steps=0"),
        ({"growth_steps": 2.5}, TypeError, "growth_steps=2.5"),
        ({"hysteresis": 0}, ValueError, "hysteresis=0"),
        ({"growth_factor": 1.0}, ValueError, "growth_factor=1.0"),
        ({"backoff_factor": 1.0}, ValueError, "backoff_factor=1.0"),
        ({"min_scale": 0.0}, ValueError, "min_scale=0.0"),
        ({"max_scale": math.inf}, ValueError, "max_scale=inf"),
    ],
)
def test_bad_settings_are_named_with_what_is_allowed(arguments, error, message):
    with pytest.raises(error, match=message):
        rules.DynamicLossScale(**arguments)


@pytest.mark.parametrize("scale", [0.0, -8.0, math.nan, math.inf])
def test_a_fixed_scale_must_be_positive_and_finite(scale):
    with pytest.raises(ValueError, match="`scale` must be positive"):
        rules.FixedLossScale(scale)
