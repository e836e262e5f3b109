"""JAX's transformations of the gates give the derivatives of float32.

`tests/wild/test_gradients.py` has the forms in which people take gradients.
"""

import functools
import itertools

import keras
import numpy as np
import pytest
from keras import ops

import tfmix
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


def net(dtype, first, x):
    x, first, last = (ops.cast(each, dtype) for each in (x, first, LAST))
    hidden = ops.softplus(ops.matmul(x, first))
    return ops.cast(ops.matmul(hidden, last), "float32")


def loss_of(dtype):
    """Returns a loss as a function of the first layer's weights."""

    def loss(first):
        if dtype == "float32":
            return ops.mean(ops.square(net(dtype, first, X)))
        gates = gates_jax.Gates(1.0, ())
        (inside,) = gates.enter([first])
        (result,), _ = gates.leave([net(dtype, inside, X)], [])
        return ops.mean(ops.square(result))

    return loss


def test_the_transpose_of_a_linearized_loss_is_scaled():
    found, exact = (
        jax.linear_transpose(jax.linearize(loss_of(dtype), FIRST)[1], FIRST)(
            # This is far below float16's range.
            np.float32(1e-7)
        )[0]
        for dtype in ("float16", "float32")
    )
    assert np.linalg.norm(found - exact) < 0.005 * np.linalg.norm(exact)


def two_gradients_of_one_call(of):
    def loss(w):
        _, pull = jax.vjp(lambda x: of(w, x), X)
        return sum(ops.mean(pull(k * of(w, X) ** 0)[0] ** 2) for k in (1, 3))

    return jax.grad(loss)(FIRST)


def penalty_times_1e3(of):
    def loss(w):
        slope = jax.grad(lambda x: of(w, x).sum())(ops.convert_to_tensor(X))
        return ops.mean(of(w, X)) + 1e3 * ops.mean(slope**2)

    return jax.grad(loss)(FIRST)


def unlike_gradients_of_one_call(of):
    def loss(w):
        made, pull = jax.vjp(lambda x: of(w, x), X)
        small, large = (pull(k * made)[0] for k in (0.1, 2.0))
        return ops.sum(small**2) + ops.sum(large**2) + ops.sum(made)

    return jax.grad(loss)(FIRST)


def gradients_compiled_apart(of):
    def loss(w):
        made, pull = jax.vjp(lambda x: of(w, x), X)
        slopes = [jax.jit(pull)(k * made)[0] for k in (0.1, 2.0)]
        return sum(ops.sum(slope**2) for slope in slopes)

    return jax.grad(loss)(FIRST)


DERIVATIVES = {
    "penalty_times_1e3": penalty_times_1e3,
    "unlike_gradients_of_one_call": unlike_gradients_of_one_call,
    "of_each_row": lambda of: jax.vmap(
        lambda x, by: jax.grad(lambda w: by * ops.sum(of(w, x[None])))(FIRST)
    )(X, 10.0 ** np.linspace(-4, 4, len(X), dtype="float32")),
    "two_gradients_of_one_call": two_gradients_of_one_call,
    "gradients_compiled_apart": gradients_compiled_apart,
}


@pytest.mark.parametrize(
    "name",
    helpers.quick_are({"penalty_times_1e3", "of_each_row"}, DERIVATIVES),
)
def test_powers_of_several_passes_are_not_mixed(name):
    found, exact = (
        jax.jit(lambda dtype=dtype: DERIVATIVES[name](result_of(dtype)))()
        for dtype in ("float16", "float32")
    )
    assert np.linalg.norm(found - exact) < 0.01 * np.linalg.norm(exact)


def result_of(dtype):
    """Returns a network as a function of its weights and of its inputs."""
    if dtype == "float32":
        return lambda first, x: net(dtype, first, x)

    def between(first, x):
        gates = gates_jax.Gates(1.0, ())
        inside = gates.enter([first, x])
        return gates.leave([net(dtype, *inside)], [])[0][0]

    return between


def derivative(function, order):
    """Differentiates by gradients ("r") and along tangents ("f")."""
    for way in order:
        inner = function
        if way == "r":
            function = jax.grad(inner)
        else:

            def function(x, inner=inner):
                return jax.jvp(inner, (x,), (np.float32(1),))[1]

    return jax.jit(function)(np.float32(0.7))


ORDERS = ["".join(each) for each in itertools.product("rf", repeat=3)]


@pytest.mark.parametrize("factor", [1e-3, 10.0])
@pytest.mark.parametrize("order", helpers.quick_are({"rrr"}, ORDERS))
def test_a_third_derivative_is_right_in_every_order(order, factor):
    def loss(x, passes_gates):
        gates = gates_jax.Gates(1.0, ())
        inside = gates.enter([x]) if passes_gates else [x]
        made = [ops.sin(1.3 * inside[0])]
        (y,) = gates.leave(made, [])[0] if passes_gates else made
        return factor * (y**2 + x * y)

    found, exact = (
        derivative(functools.partial(loss, passes_gates=each), order)
        for each in (True, False)
    )
    np.testing.assert_allclose(found, exact, rtol=1e-5)


def test_a_member_that_is_not_finite_leaves_the_others_alone():
    def loss(first):
        gates = gates_jax.Gates(1.0, ())
        (inside,) = gates.enter([first])
        (made,), _ = gates.leave([net("float16", inside, X)], [])
        return 1e-6 * ops.mean(made**2)

    members = ops.stack([FIRST, np.nan * FIRST, FIRST])
    found = jax.vmap(jax.grad(loss))(members)
    assert [bool(np.isfinite(x).all()) for x in found] == [True, False, True]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_outside_leaves_as_nan(bad):
    found = jax.grad(lambda w: bad * loss_of("float16")(w))(FIRST)
    assert np.isnan(found).all()


@pytest.mark.parametrize("mode", steps.MODES)
def test_no_healthy_step_makes_a_nan_or_an_infinity(mode):
    with jax.debug_nans(True), jax.debug_infs(True):
        steps.compiled(jax.grad(loss_of("float16")), mode)(FIRST)


def test_no_gate_keeps_what_jax_traced():
    with jax.checking_leaks():
        jax.jit(lambda: penalty_times_1e3(result_of("float16")))()


def test_no_product_keeps_what_jax_traced():
    with tfmix.policy_scope("mixed_float16"):
        model = keras.Sequential([keras.layers.Dense(2), keras.layers.Dense(1)])
    model.build(X.shape)
    weights = [variable.value for variable in model.trainable_variables]
    with jax.checking_leaks():
        jax.jit(jax.grad(lambda w: ops.sum(model.stateless_call(w, [], X)[0])))(
            weights
        )
