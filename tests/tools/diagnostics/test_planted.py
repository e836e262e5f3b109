"""`check` and the monitor name the layer of a planted fault."""

import keras
import pytest

from tests.tools.diagnostics import faults
from tfmix._keras import replacing
from tfmix.loss_scaling import optimizer as scaling
from tfmix.tools.callbacks import numerics_monitor
from tfmix.tools.diagnostics import check

# NumPy warns about a factor of 3e5 in a float16 layer, which TensorFlow turns
# into a tensor. That factor is a planted fault.
pytestmark = pytest.mark.filterwarnings(
    "ignore:(?s).*overflow encountered in cast:RuntimeWarning"
)


ON_JAX = keras.backend.backend() == "jax"
# JAX compiles every op that it meets for the first time.
QUICK = ["epsilon_of_1e_8", "variance_of_an_offset"]
QUICK = QUICK if ON_JAX else [*faults.KINDS]


def draws(count, quick):
    """Marks all draws as slow but the first of some kinds."""
    return [
        pytest.param(
            kind,
            seed,
            marks=() if kind in quick and not seed else pytest.mark.slow,
        )
        for seed in range(count)
        for kind in faults.KINDS
    ]


@pytest.mark.parametrize(("kind", "seed"), draws(8, QUICK))
def test_the_planted_layer_is_named_first(kind, seed):
    case = faults.plant(kind, seed)
    report = check.check(case.model, case.x, case.y, loss=case.loss)
    first = report.rows[0]
    assert first.layer == case.layer, str(report)
    assert first.verdict != "ok"
    assert first.advice


@pytest.mark.slow
@pytest.mark.parametrize("kind", faults.KINDS)
def test_the_suggested_policy_has_no_fault(kind):
    case = faults.plant(kind, 0)
    report = check.check(case.model, case.x, case.y, loss=case.loss)
    suggested = report.suggested_policy()
    assert report.again(suggested).healthy


# `compile` computes its loss in float32.
KINDS = [
    draw for draw in draws(1, QUICK[:1]) if draw.values[0] != "loss_over_pixels"
]


@pytest.mark.parametrize(("kind", "seed"), KINDS)
def test_the_monitor_names_the_layer_on_the_first_step(kind, seed):
    # Otherwise `compile` would give the model what prevents some of them.
    replacing.want(replacing.COMPILE, False)
    case = faults.plant(kind, seed)
    optimizer = scaling.LossScaleOptimizer(keras.optimizers.SGD(1e-6))
    case.model.compile(optimizer, case.loss, jit_compile=ON_JAX)
    monitor = numerics_monitor.NumericsMonitor(every=1)
    how = {"batch_size": len(case.x), "verbose": 0, "callbacks": [monitor]}
    case.model.fit(case.x, case.y, **how)
    first = monitor.events[0]
    assert (first.step, first.layer) == (0, case.layer)
