"""An eager loop that skips step after step warns; `check_health` raises."""

import keras
import numpy as np
import pytest

import tfmix
from tests import loops, steps
from tfmix.loss_scaling import standstill

BAD = np.full((2, 4), np.nan, "float32")
GOOD = np.ones((2, 4), "float32")


def run(batches, way, wrap=lambda optimizer: optimizer):
    """Trains a float16 model in a loop, one step per batch."""
    tfmix.set_global_policy("mixed_float16")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    optimizer = wrap(keras.optimizers.Adam(name="adam"))
    loop = loops.Loop(model, optimizer, way)
    for x in batches:
        loop.step(*map(keras.ops.convert_to_tensor, (x, x[:, :1])))
    return optimizer


def wrapped(optimizer):
    return tfmix.LossScaleOptimizer(optimizer, loss_scale=tfmix.NoLossScale())


@pytest.mark.parametrize(
    "wrap", [lambda x: x, wrapped], ids=["bare", "wrapped"]
)
def test_the_eighth_skip_in_a_row_warns_once(wrap, said):
    run([BAD] * 7, "eager", wrap)
    assert said == []
    run([BAD] * 12, "eager", wrap)
    (line,) = said
    assert line.startswith(
        "no update was applied in the last 8 steps of 'adam'"
    )
    assert "kernel: not finite in 8 skipped step(s)" in line


@pytest.mark.costly
@pytest.mark.parametrize("way", steps.MODES[1:])
def test_a_compiled_loop_is_silent_until_it_is_asked(way, said):
    optimizer = run([BAD] * 10, way, wrapped)
    assert said == []
    with pytest.raises(tfmix.LossScaleError, match="in the last 10 steps"):
        optimizer.check_health(max_consecutive_skips=8)


@pytest.mark.costly
@pytest.mark.parametrize(
    "wrap", [lambda x: x, wrapped], ids=["bare", "wrapped"]
)
def test_an_applied_step_restarts_the_count(wrap, said):
    run([BAD] * 7 + [GOOD] + [BAD] * 7, "eager", wrap)
    assert said == []


def test_the_variable_nearest_the_output_is_named_first(said):
    counts = {"a/kernel": 8, "b/kernel": 8, "c/kernel": 0}
    standstill.warn_of_eighth("sgd", 8, counts)
    (line,) = said
    assert line.index("b/kernel") < line.index("a/kernel")
    assert "c/kernel" not in line


@pytest.mark.costly
def test_fit_leaves_it_to_the_line_after_the_epoch(said):
    tfmix.set_global_policy("mixed_float16")
    model = keras.Sequential([keras.layers.Dense(1, dtype="float32")])
    model.add(keras.layers.Dense(1))
    model.compile("sgd", "mse")
    model.fit(np.repeat(BAD, 8, 0), np.ones((16, 1)), batch_size=2, verbose=0)
    assert not any("the last 8 steps of" in line for line in said)
