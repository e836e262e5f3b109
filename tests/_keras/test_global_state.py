"""Keras's scopes nest as `global_state` takes them to."""

import keras

from tfmix._keras import global_state


def test_scopes_are_listed_from_the_innermost():
    with keras.StatelessScope() as outer, keras.StatelessScope() as inner:
        assert [*global_state.open_scopes()] == [inner, outer]
    assert not [*global_state.open_scopes()]
