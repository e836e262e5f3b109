"""The slots of every Keras optimizer are found by their variable."""

import keras
import numpy as np
import pytest

from tests import helpers
from tfmix._keras import optimizers, slots_by_variable
from tfmix.optimizers import bfloat16_optimizer


def variables(dtype="float32"):
    return [
        keras.Variable(np.ones((3, 2)), dtype=dtype, name="kernel"),
        keras.Variable(np.ones(2), dtype=dtype, name="bias"),
        # It has the shape and name of another one.
        keras.Variable(np.ones(2), dtype=dtype, name="bias"),
    ]


@pytest.mark.parametrize("name", helpers.optimizer_names())
def test_every_slot_is_found_and_belongs_to_its_variable(name):
    optimizer = helpers.make_optimizer(name, use_ema=True)
    known = variables()
    optimizer.build(known)
    slots = slots_by_variable.slots(optimizer)
    if name == "Muon" and not hasattr(keras.optimizers, "MultiOptimizer"):
        # Slots in Keras 3.12 do not name their variable, and are refused.
        assert slots is None
        return
    assert slots["_model_variables_moving_average"][0].shape == (3, 2)
    found = {id(slot) for values in slots.values() for slot in values}
    found |= {
        id(each) for each in slots_by_variable.numbers(optimizer).values()
    }
    assert {id(variable) for variable in optimizer.variables} <= found


def test_views_in_bfloat16_are_slots_too():
    inner = keras.optimizers.Adam()
    optimizer = bfloat16_optimizer.BFloat16Optimizer(
        inner, slot_dtype="bfloat16"
    )
    optimizer.build(variables("bfloat16"))
    assert len(slots_by_variable.slots(inner)) == 2


class Unnamed(keras.optimizers.SGD):
    """Has a list that does not name its variables."""

    def build(self, known):
        super().build(known)
        self.sums = [
            self.add_variable(variable.shape, name=f"sum_{number}")
            for number, variable in enumerate(known)
        ]


class Beside(keras.optimizers.SGD):
    """Has a variable beside the slots."""

    def build(self, known):
        super().build(known)
        self.shared = self.add_variable((3,), name="shared")


@pytest.mark.parametrize("kind", [Unnamed, Beside])
def test_variables_of_unknown_meaning_are_not_guessed_at(kind):
    optimizer = kind(0.1, momentum=0.9)
    optimizer.build(variables())
    assert slots_by_variable.slots(optimizer) is None


def test_slots_move_to_other_variables():
    optimizer = keras.optimizers.SGD(1.0, momentum=0.5, weight_decay=0.1)
    old, new = variables(), variables()
    optimizer.exclude_from_weight_decay(var_list=[old[1]])
    optimizer.build(old)
    optimizer.momentums[1].assign(np.full(2, 4.0))
    moved = dict(zip(map(id, old), new, strict=True))
    slots_by_variable.remembered(optimizer)(moved)
    assert not optimizers.uses_weight_decay(optimizer, new[1])
    assert optimizers.uses_weight_decay(optimizer, new[2])
    optimizer.apply([keras.ops.zeros(v.shape) for v in new], new)
    helpers.assert_close(new[1], np.full(2, 3.0), "float32")
    helpers.assert_close(old[1], np.ones(2), "float32")


def test_a_fresh_optimizer_has_the_settings_and_exclusions():
    optimizer = keras.optimizers.AdamW(0.3, beta_1=0.7)
    known = variables()
    optimizer.exclude_from_weight_decay(var_list=[known[0]])
    optimizer.build(known)
    made = slots_by_variable.fresh(optimizer, {})
    assert not made.built
    assert made.beta_1 == 0.7
    excluded = [not optimizers.uses_weight_decay(made, v) for v in known]
    assert excluded == [True, False, False]
