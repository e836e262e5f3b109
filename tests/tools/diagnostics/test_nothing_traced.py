"""Functions run op by op in a block, and as before after it."""

import keras
import pytest

from tfmix.tools.diagnostics import check

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


def test_functions_are_traced_again_after_an_error(is_eager):
    def failing():
        with check.nothing_traced():
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert not is_eager()


def test_a_user_who_asked_for_eager_functions_keeps_them(is_eager):
    import tensorflow as tf

    tf.config.run_functions_eagerly(True)
    try:
        with check.nothing_traced():
            assert is_eager()
        assert is_eager()
    finally:
        tf.config.run_functions_eagerly(False)
