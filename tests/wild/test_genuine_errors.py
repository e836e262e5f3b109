"""Errors that float32 also has are raised unchanged, and once."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfmix
from tests import helpers

X = np.ones((4, 8), "float32")


def wrong_shape(x):
    return x + ops.ones((3, 5), x.dtype)


def text_with_number(x):
    return x + "one"


def wrong_name(x):
    return x.no_such_attribute


def own_message(x):
    raise RuntimeError("the user said so")


def own_dtype_message(x):
    raise TypeError("dtype int32 is wanted here, float32 is wrong, too")


def integers_with_floats(x):
    import tensorflow as tf

    return tf.cast(x, tf.float32) + tf.ones((4, 8), tf.int32)


def not_finite_by_design(x):
    import tensorflow as tf

    return tf.debugging.check_numerics(x / 0.0 - x / 0.0, "no number")


RAW = [integers_with_floats, not_finite_by_design]
GENUINE = [
    wrong_shape,
    text_with_number,
    wrong_name,
    own_message,
    own_dtype_message,
    *(
        pytest.param(one, marks=helpers.requires_backend("tensorflow"))
        for one in RAW
    ),
]


def message_of(function, policy):
    """Returns kind and text of the error of a layer in a layer."""

    class Inner(layers.Layer):
        def call(self, x):
            return function(x)

    class Outer(layers.Layer):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def call(self, x):
            return self.inner(x) * 2.0

    tfmix.set_global_policy(policy)
    layer = Outer()
    with pytest.raises(Exception) as caught:  # noqa: PT011, compared below
        layer(X)
    assert layer.dtype_policy.name == layer.inner.dtype_policy.name == policy
    # The rest lists the arguments, whose dtype differs.
    text = str(caught.value).split("Arguments received")[0]
    for dtype in ("float32", "float16", "bfloat16", "half", "bfloat"):
        text = text.replace(dtype, "float")
    return caught.type, text


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("function", GENUINE)
def test_a_genuine_error_comes_through_as_in_float32(function, policy):
    kind, text = message_of(function, "float32")
    keras.utils.clear_session(free_memory=False)
    assert message_of(function, policy) == (kind, text)
    assert text.count("Exception encountered") <= 1
