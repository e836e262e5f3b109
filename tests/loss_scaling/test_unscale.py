"""Gradients are divided, and found not finite, each at its own index."""

import keras
import numpy as np
import pytest

from tests import helpers
from tfmix.loss_scaling import all_finite, unscale
from tfmix.loss_scaling import optimizer as optimizers


def arrays():
    rng = np.random.default_rng(0)
    shapes = [(3, 2), (2,), (3, 2), (), (2,), (3, 2)]
    return [np.asarray(rng.normal(size=s), "float32") for s in shapes]


def tensors(values):
    return [
        None if v is None else keras.ops.convert_to_tensor(v) for v in values
    ]


def test_each_gradient_is_divided_at_its_own_place():
    values = arrays()
    values[1] = None
    true = unscale.true_gradients(tensors(values), [None] * 6, np.float32(4.0))
    for part, value in zip(true, values, strict=True):
        if value is None:
            assert part is None
        else:
            helpers.assert_same_bits(part, value / np.float32(4.0))


@pytest.mark.parametrize("bad", range(6))
def test_the_one_bad_gradient_is_found_at_its_own_place(bad):
    values = arrays()
    values[bad] = np.full_like(values[bad], np.nan)
    values[(bad + 1) % 6] = None
    flags = keras.ops.convert_to_numpy(all_finite.not_finite(tensors(values)))
    assert flags.tolist() == [position == bad for position in range(6)]


@pytest.mark.filterwarnings("ignore:The gradients are divided")
def test_a_step_on_some_variables_blames_the_right_ones():
    names = ["a", "b", "c"]
    model = [keras.Variable(np.zeros(2, "float32"), name=n) for n in names]
    wrapped = optimizers.LossScaleOptimizer("sgd")
    wrapped.build(model)
    good, bad = tensors([np.ones(2, "float32"), np.full(2, np.inf, "float32")])
    wrapped.apply([bad, good], [model[2], model[0]])
    assert list(wrapped.overflow_counts.values()) == [0, 0, 1]
