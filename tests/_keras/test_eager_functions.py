"""Functions run op by op in the thread that asks for it, and in no other."""

import threading

import keras
import pytest

from tfmix._keras import tracing

pytestmark = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="TensorFlow's functions"
)


@pytest.fixture
def is_eager():
    import tensorflow as tf

    def ask():
        seen = []
        # This is a new function each time, because a traced one keeps its
        # answer.
        tf.function(lambda: seen.append(tf.executing_eagerly()))()
        return seen[0]

    return ask


def in_thread(function):
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def test_a_block_inside_a_block_ends_neither(is_eager):
    with tracing.nothing_traced():
        with tracing.nothing_traced():
            assert is_eager()
        assert is_eager()
    assert not is_eager()


def test_blocks_of_two_threads_end_separately(is_eager):
    both, over = threading.Barrier(2), threading.Event()
    found = []

    def other():
        with tracing.nothing_traced():
            both.wait(60)
            over.wait(60)
            found.append(is_eager())

    thread = threading.Thread(target=other)
    thread.start()
    with tracing.nothing_traced():
        both.wait(60)
    assert not is_eager()
    over.set()
    thread.join()
    assert found == [True]
    assert not is_eager()


def test_tensorflows_own_property_is_restored_after_an_error():
    import tensorflow as tf

    owner = type(tf.function(lambda: None))
    before = vars(owner)[tracing._RUNS_EAGERLY]

    def failing():
        with tracing.nothing_traced():
            assert vars(owner)[tracing._RUNS_EAGERLY] is not before
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert vars(owner)[tracing._RUNS_EAGERLY] is before


def test_a_user_who_asked_for_eager_functions_keeps_them(is_eager):
    import tensorflow as tf

    tf.config.run_functions_eagerly(True)
    try:
        with tracing.nothing_traced():
            assert in_thread(is_eager)
        assert is_eager()
    finally:
        tf.config.run_functions_eagerly(False)
