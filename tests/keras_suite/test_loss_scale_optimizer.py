"""Keras's own test file for its loss-scale optimizer, run on tfmix's class."""

import importlib.util

import pytest

from tfmix.loss_scaling import optimizer

_MODULE = "keras.src.optimizers.loss_scale_optimizer_test"


def _keras_tests():
    if importlib.util.find_spec(_MODULE) is None:
        pytest.skip(
            "the installed Keras ships no tests", allow_module_level=True
        )
    module = importlib.import_module(_MODULE)
    module.LossScaleOptimizer = optimizer.LossScaleOptimizer
    return module.LossScaleOptimizerTest


# Keras's tests pass gradients of an unscaled loss to `apply`, and set a factor
# on the inner optimizer. tfmix warns about both.
@pytest.mark.filterwarnings("ignore:The gradients are divided by the loss")
@pytest.mark.filterwarnings("ignore:The fixed loss_scale_factor")
class TestKerasLossScaleOptimizer(_keras_tests()):
    """Keras's tests, which pytest collects like any `unittest` class."""


def test_the_class_under_test_is_tfmix_own():
    module = importlib.import_module(_MODULE)
    assert module.LossScaleOptimizer is optimizer.LossScaleOptimizer
    names = [n for n in dir(TestKerasLossScaleOptimizer) if "test_" in n]
    assert len(names) >= 10
