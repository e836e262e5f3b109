"""Casts, wide ops and arithmetic take an input as it came."""

import keras
import numpy as np
import pytest
from keras import ops

import tfmix
from tests import helpers, steps

POLICIES = "mixed_float16", "mixed_bfloat16"
IDS = np.float32([[7], [301], [2049], [4999]])
TIMES = np.float32([[1.6e9], [1.7e9 + 86_400], [1.7e9 + 864_000]])


def as_layer(function, columns):
    return keras.Sequential([keras.Input((columns,)), helpers.Calls(function)])


def as_model(function, columns):
    class Model(keras.Model):
        def call(self, x):
            return function(x)

    return Model()


FUNCTIONS = {
    "ids": (lambda x: ops.cast(ops.cast(x[:, 0], "int32"), "float32"), IDS),
    "ids in int16": (lambda x: ops.cast(ops.cast(x, "int16"), "float32"), IDS),
    "a bucket": (lambda x: x % 97, IDS),
    "a digit": (lambda x: x // 100, IDS),
    "even": (lambda x: ops.cast(ops.equal(x, 2048), "float32"), IDS),
    "above": (lambda x: ops.cast(x > 2048.0, "float32"), IDS),
    "floor": (lambda x: ops.floor(x), IDS + 0.5),
    "a difference": (lambda x: x - 300, IDS),
    "a neighbour": (lambda x: x - ops.flip(x, 0), IDS),
    "days": (lambda x: (x - 1.7e9) / 86_400, TIMES),
    "hour": (lambda x: ops.sin(x[:, 0] % 86_400 / 86_400), TIMES),
    "one column of two": (
        lambda x: ops.squeeze(ops.split(x, 2, axis=1)[1], 1) % 97,
        np.concatenate([IDS, IDS[::-1]], 1),
    ),
    "moved": (
        lambda x: ops.reshape(ops.transpose(x), (-1,))[1:] % 97,
        np.concatenate([IDS, IDS[::-1]], 1),
    ),
    "logarithm": (lambda x: ops.log(x - 6.5), IDS),
}


@pytest.mark.parametrize("make", [as_layer, as_model])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_column_of_ids_or_times_is_not_rounded(name, policy, make):
    function, x = FUNCTIONS[name]
    expected = helpers.to_numpy(function(ops.convert_to_tensor(x)))
    tfmix.set_global_policy(policy)
    found = make(function, x.shape[1]).predict(x, verbose=0)
    # The remainder of 97, or the sine, may be rounded once.
    within = 1e-3 if policy == "mixed_float16" else 1e-2
    np.testing.assert_allclose(found, expected, rtol=within)


@pytest.mark.parametrize("mode", steps.MODES)
def test_what_an_op_makes_of_an_input_is_a_16_bit_activation(mode):
    tfmix.set_global_policy("mixed_float16")
    seen = []

    def function(x):
        # A product is no longer what was only cast.
        y = ops.matmul(x, ops.ones((1, 2), x.dtype))
        seen.extend([x * 2.0, y, y * 2.0])
        return y

    layer = helpers.Calls(function)
    steps.compiled(lambda x: layer(x), mode)(ops.convert_to_tensor(IDS))
    assert [helpers.dtype_of(t) for t in seen[:3]] == [
        "float32",
        "float16",
        "float16",
    ]
