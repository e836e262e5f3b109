"""Keras's scopes nest as `global_state` takes them to."""

import gc

import keras

from tests import helpers
from tfmix._keras import context
from tfmix.ops import tensors


def test_scopes_are_listed_from_the_innermost():
    with keras.StatelessScope() as outer, keras.StatelessScope() as inner:
        assert [*context.open_scopes()] == [inner, outer]
    assert not [*context.open_scopes()]


@helpers.requires_backend("tensorflow")
def test_a_note_leaves_nothing_to_make_while_python_collects_garbage():
    name = "_tfmix_noted_here"
    tensor = keras.ops.ones((2,))
    tensors.put_note(tensor, name, [1])
    held = [x for x in gc.get_objects() if type(x) is dict and name in x]
    assert held == [vars(tensor)]
