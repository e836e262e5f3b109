"""A model on two replicas is converted, trains as on one, and comes back."""

import contextlib

import keras
import numpy as np
import pytest

from tests import helpers
from tests.conversion import test_orders as small
from tfmix.conversion import convert

if keras.backend.backend() != "tensorflow":
    pytest.skip("tf.distribute is TensorFlow's own", allow_module_level=True)


def losses(strategy, policy, inside):
    """Trains in float32, in 16 bit and in float32 again."""
    keras.utils.set_random_seed(3)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = small.small_model()
        model.compile(keras.optimizers.Adam(0.02), "mse", jit_compile=False)
    found = [small.losses(model, 2)]
    scope = strategy.scope() if strategy and inside else None
    with scope or contextlib.nullcontext():
        report = convert.apply_policy(model, policy)
    found.append(small.losses(model, 2))
    assert model.layers[0].kernel.dtype == policy
    if strategy:
        assert_mirrored(model)
    report.undo()
    found.append(small.losses(model, 2))
    assert {v.dtype for v in model.trainable_variables} == {"float32"}
    if strategy:
        assert_mirrored(model)
    return np.ravel(found)


def assert_mirrored(model):
    for variable in [*model.variables, *model.optimizer.variables]:
        copies = variable.value.values
        assert len(copies) == 2, variable.path
        helpers.assert_same_bits(copies[0].numpy(), copies[1].numpy())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "inside"),
    [
        ("bfloat16", False),
        ("float16", True),
        pytest.param("bfloat16", True, marks=pytest.mark.slow),
        pytest.param("float16", False, marks=pytest.mark.slow),
    ],
)
def test_replicas_train_in_pure_16_bit_like_one_device(policy, inside):
    found = losses(helpers.mirrored_strategy(), policy, inside)
    expected = losses(None, policy, inside)
    # Both sum the same products, in different orders.
    np.testing.assert_allclose(found, expected, rtol=helpers.TOLERANCES[policy])
    assert found[-1] < found[0]
