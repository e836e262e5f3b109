"""JAX's transformations of the gates give the derivatives of float32.

`tests/wild/test_gradients.py` has the forms in which people take gradients.
"""

import keras
import numpy as np
import pytest
from keras import ops

from tests import helpers, steps

if keras.backend.backend() == "jax":
    import jax

    from tfmix.gradient_scaling import gates_jax
else:
    pytestmark = helpers.requires_backend("jax")

RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 8)).astype("float32")
FIRST = 0.3 * RNG.normal(size=(8, 32)).astype("float32")
LAST = 0.2 * RNG.normal(size=(32, 1)).astype("float32")


def loss_of(dtype):
    """Returns a loss as a function of the first layer's weights."""

    def net(first):
        x, first, last = (ops.cast(each, dtype) for each in (X, first, LAST))
        hidden = ops.softplus(ops.matmul(x, first))
        return ops.cast(ops.matmul(hidden, last), "float32")

    def loss(first):
        if dtype == "float32":
            return ops.mean(ops.square(net(first)))
        gates = gates_jax.Gates(1.0, ())
        (result,), _ = gates.leave([net(*gates.enter([first]))], [])
        return ops.mean(ops.square(result))

    return loss


def at_two_points(function):
    return lambda first: jax.vmap(function)(ops.stack([first, first]))


def in_a_loop(loss):
    def looped(first):
        def add(total, _):
            return total + loss(first), None

        return jax.lax.scan(add, 0.0, None, length=2)[0]

    return looped


def along(loss, first):
    return jax.linearize(loss, first)[1](first)


# Maps a loss and a point to a function for forward mode.
FORWARDS = {
    "jvp_of_jit": lambda loss, w: jax.jvp(jax.jit(loss), (w,), (w,))[1],
    "jvp_of_scan": lambda loss, w: jax.jvp(in_a_loop(loss), (w,), (w,))[1],
    "jvp_of_checkpoint": lambda loss, w: jax.jvp(
        jax.checkpoint(loss), (w,), (w,)
    )[1],
    "jvp_of_jit_of_grad": lambda loss, w: jax.jvp(
        jax.jit(jax.grad(loss)), (w,), (w,)
    )[1],
    "linearize": along,
    "linearize_of_jit": lambda loss, w: along(jax.jit(loss), w),
    "linearize_of_grad": lambda loss, w: along(jax.grad(loss), w),
    "linearize_of_vmap": lambda loss, w: along(at_two_points(loss), w),
    "vmap_of_linearize": lambda loss, w: at_two_points(
        lambda w: along(loss, w)
    )(w),
    "grad_of_linearize": lambda loss, w: jax.grad(lambda w: along(loss, w))(w),
    "linearize_of_linearize": lambda loss, w: along(
        lambda w: along(loss, w), w
    ),
    "transpose_of_linearize": lambda loss, w: jax.linear_transpose(
        jax.linearize(loss, w)[1], w
    )(1.0)[0],
    "vmap_of_the_linear_function": lambda loss, w: jax.vmap(
        jax.linearize(loss, w)[1]
    )(ops.stack([w, 2 * w])),
}


@pytest.mark.costly
@pytest.mark.parametrize("mode", steps.MODES)
@pytest.mark.parametrize("name", FORWARDS)
def test_forward_mode_gives_the_derivatives_of_float32(name, mode):
    def derivative(dtype):
        return lambda first: FORWARDS[name](loss_of(dtype), first)

    found, exact = (
        steps.compiled(derivative(dtype), mode)(ops.convert_to_tensor(FIRST))
        for dtype in ("float16", "float32")
    )
    assert np.linalg.norm(found - exact) < 0.01 * np.linalg.norm(exact)


def test_the_transpose_of_a_linearized_loss_is_scaled():
    found, exact = (
        jax.linear_transpose(jax.linearize(loss_of(dtype), FIRST)[1], FIRST)(
            # This is far below float16's range.
            np.float32(1e-7)
        )[0]
        for dtype in ("float16", "float32")
    )
    assert np.linalg.norm(found - exact) < 0.005 * np.linalg.norm(exact)
