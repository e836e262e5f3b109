"""The settings of a block hold only in it, and end with it."""

import threading

import pytest

from tfmix._keras import context

block = context.block


def test_a_value_holds_until_its_block_ends_also_with_an_error():
    with context.holding(power=2.0):
        with context.holding(in_loop=True):
            assert (block.get().power, block.get().in_loop) == (
                2.0,
                True,
            )
        assert (block.get().power, block.get().in_loop) == (2.0, False)
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
