"""Settings of a block hold only in it, and Keras's scopes are known."""

import gc
import threading

import keras
import pytest

from tests import helpers
from tfmix._keras import context
from tfmix.ops import tensors

block = context.block


def test_a_value_holds_until_its_block_ends_also_with_an_error():
    with context.holding(power=2.0):
        with context.holding(in_loop=True):
            assert block.get() == context.Block(power=2.0, in_loop=True)
        assert block.get() == context.Block(power=2.0)
    with pytest.raises(ZeroDivisionError), context.holding(around=1):
        raise ZeroDivisionError
    assert block.get() == context.Block()


def test_another_thread_sees_nothing_of_it():
    seen = []
    with context.holding(power=2.0):
        thread = threading.Thread(target=lambda: seen.append(block.get()))
        thread.start()
        thread.join()
    assert seen == [context.Block()]


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
