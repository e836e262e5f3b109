"""`check` and the monitor name the layer of a planted fault."""

import keras
import numpy as np
import pytest

from tests.diagnostics import faults
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
QUICK = QUICK if ON_JAX else faults.KINDS


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


@pytest.mark.parametrize(("kind", "seed"), draws(20, QUICK))
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
    suggested = report.suggested_policy(progress=False)
    assert report.again(suggested).healthy


def of_a_bad_step(kind, case):
    """Returns data that triggers the fault at a loss scale of 1."""
    y = case.y
    if kind == "embedding_row_of_1e5":
        table = np.array(case.model.trainable_variables[0])
        case.x[0, 0] = np.argmax(np.abs(table).max(-1))
    if kind == "loss_over_pixels":
        # Gradients are summed in float32, so each must overflow itself.
        y = y + 1e6
    return case.x, y


# Under JAX, compiling each operation takes longer than compiling the step.
OP_BY_OP = [] if ON_JAX else [("loss_over_pixels", 0, False)]
UNDER_XLA = [
    pytest.param(*draw.values, True, marks=draw.marks)
    for draw in draws(5, ["epsilon_of_1e_8"] if ON_JAX else [])
]


@pytest.mark.parametrize(("kind", "seed", "jit"), [*OP_BY_OP, *UNDER_XLA])
def test_the_monitor_names_the_layer_on_the_first_step(kind, seed, jit):
    # Otherwise `compile` would give the model what prevents some of them.
    replacing.want(replacing.COMPILE, False)
    case = faults.plant(kind, seed)
    optimizer = scaling.LossScaleOptimizer(keras.optimizers.SGD(1e-6))
    case.model.compile(optimizer, case.loss, jit_compile=jit)
    monitor = numerics_monitor.NumericsMonitor(every=1)
    x, y = of_a_bad_step(kind, case)
    case.model.fit(x, y, batch_size=len(x), verbose=0, callbacks=[monitor])
    backward = kind in ("loss_over_pixels", "vanishing_gradient")
    first = monitor.events[0]
    assert (first.step, first.layer) == (0, case.layer)
    assert first.phase == ("backward" if backward else "forward")
