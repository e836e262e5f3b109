"""A value that a loop carries is a float32 sum over its steps."""

import numpy as np
import pytest
from keras import ops

import tfmix
from tests import helpers, steps

MODES = [*steps.MODES]
POLICIES = "mixed_float16", "mixed_bfloat16"
STEPS = 1000


def next_scores(scores, emissions):
    """Adds what a step of a hidden Markov model adds: log 5, if all are 0."""
    pairs = scores[:, :, None] + ops.zeros((1, 5, 5), scores.dtype)
    return ops.logsumexp(pairs, 1) + emissions


def by_scan(x):
    steps = ops.transpose(x, [1, 0, 2])
    last, _ = ops.scan(
        lambda scores, step: (next_scores(scores, step),) * 2,
        steps[0],
        steps[1:],
    )
    return ops.logsumexp(last, 1)


def by_eulers_method(x):
    return ops.fori_loop(
        0, 1000, lambda n, y: y + ops.ones_like(y) * 1e-3, x[:, 0, 0] + 1
    )


def by_while_loop(x):
    return ops.while_loop(
        lambda n, y: n < 1000,
        lambda n, y: (n + 1, y + 1e-3 * ops.ones_like(y)),
        (0, x[:, 0, 0] + 1),
    )[1]


def by_associative_scan(x):
    return ops.associative_scan(ops.add, x[:, :, 0] + 0.1, axis=1)[:, -1]


def by_scan_of_jax(x):
    import jax

    steps = ops.transpose(x, [1, 0, 2])
    last, _ = jax.lax.scan(
        lambda scores, step: (next_scores(scores, step), None),
        steps[0],
        steps[1:],
    )
    return ops.logsumexp(last, 1)


def by_fori_loop_of_jax(x):
    import jax

    return jax.lax.fori_loop(
        0, 1000, lambda n, y: y + ops.ones_like(y) * 1e-3, x[:, 0, 0] + 1
    )


RUNNING = {
    by_scan: STEPS * np.log(5),
    by_eulers_method: 2.0,
    by_while_loop: 2.0,
    by_associative_scan: 100.0,
}
if helpers.ON_JAX:
    RUNNING |= {by_scan_of_jax: STEPS * np.log(5), by_fori_loop_of_jax: 2.0}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("function", RUNNING)
def test_a_running_value_of_1000_steps_is_that_of_float32(function, policy):
    tfmix.set_global_policy(policy)
    layer = helpers.Calls(function)
    x = ops.zeros((1, STEPS, 5))
    # Keras's TensorFlow has that scan in eager mode alone.
    is_eager = function is by_associative_scan and not helpers.ON_JAX
    mode = MODES[0 if is_eager else 1]
    found = steps.compiled(lambda x: layer(x), mode)(x)
    # One factor of each step, and the result, may be rounded once.
    within = 1e-3 if policy == "mixed_float16" else 1e-2
    expected = RUNNING[function]
    np.testing.assert_allclose(helpers.to_numpy(found), expected, rtol=within)
    assert layer.compute_dtype == policy.removeprefix("mixed_")


@pytest.mark.parametrize("mode", steps.MODES)
def test_a_carry_is_float32_and_an_integer_stays_one(mode):
    tfmix.set_global_policy("mixed_float16")
    x = ops.cast(np.ones(3), "float16")

    def run(x):
        count, total = ops.while_loop(
            lambda n, y: n < 3, lambda n, y: (n + 1, y + x), (0, x)
        )
        last, each = ops.scan(lambda c, row: (c + row, row * 2), x[0], x)
        return count, total, last, each

    found = steps.compiled(run, mode)(x)
    dtypes = [helpers.dtype_of(one) for one in found]
    # Keras's TensorFlow collects what a step returns in the carry's dtype.
    result = "float16" if helpers.ON_JAX else "float32"
    assert dtypes == ["int32", "float32", "float32", result]
