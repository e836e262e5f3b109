"""The suggested policy trains like float32, if float32 trains well."""

import keras
import numpy as np
import pytest

from tests.diagnostics import numerics_trainable as trainable
from tfmix.conversion import convert, planned_policies
from tfmix.diagnostics import check
from tfmix.loss_scaling import optimizer as scaling

STEPS = 40
# A loss counts as that of float32 if it differs by less.
CLOSE = 0.01


def losses(case, scale):
    """Trains with Adam and returns the loss of each step."""
    keras.utils.set_random_seed(0)
    inner = keras.optimizers.Adam(case.rate, epsilon=case.epsilon)
    optimizer = scaling.LossScaleOptimizer(inner, initial_scale=scale)
    # Otherwise JAX would compile each operation, which takes minutes.
    jit = keras.backend.backend() == "jax"
    case.model.compile(optimizer, case.loss, jit_compile=jit)
    history = case.model.fit(
        case.x,
        case.y,
        batch_size=len(case.x),
        epochs=STEPS,
        shuffle=False,
        verbose=0,
    )
    return history.history["loss"]


def assign(model, values):
    for variable, value in zip(model.variables, values, strict=True):
        variable.assign(value)


def in_dtypes(model, dtypes):
    for layer, dtype in dtypes.items():
        object.__setattr__(layer, "_dtype_policy", dtype)


def in_float32(case, weights):
    """Trains in float32 from given weights, and restores the model."""
    model = case.model
    before = {layer: layer._dtype_policy for layer in model._flatten_layers()}
    start = [np.array(variable) for variable in model.variables]
    in_dtypes(model, planned_policies.reference(model))
    assign(model, weights)
    found = losses(case, 1.0)
    in_dtypes(model, before)
    assign(model, start)
    return found


def nudged(weights):
    """Returns weights that differ by the rounding of float16."""
    generator = np.random.default_rng(0)
    return [
        value * (1 + generator.normal(size=value.shape) * 2.0**-12)
        if value.dtype == np.float32
        else value
        for value in weights
    ]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", trainable.KINDS)
def test_the_suggestion_trains_to_the_loss_of_float32(kind, seed):
    case = trainable.plant(kind, seed)
    weights = [np.array(variable) for variable in case.model.variables]
    exact = in_float32(case, weights)
    again = in_float32(case, nudged(weights))
    # The comparison is only valid if the loss falls far, and repeatably.
    assert exact[-1] < 0.7 * exact[0]
    assert again[-1] == pytest.approx(exact[-1], rel=CLOSE / 2)
    report = check.check(case.model, case.x, case.y, loss=case.loss)
    assert report.rows[0].layer == case.layer
    convert.apply_policy(case.model, report.suggested_policy(progress=False))
    found = losses(case, 2.0**15)
    assert case.model.optimizer.skipped_steps == 0
    assert found[-1] == pytest.approx(exact[-1], rel=CLOSE)
