"""Compiled functions round like single ops, and equal ones are reused."""

import keras
import numpy as np
import pytest
from keras import ops

import tfmix
from tfmix.diagnostics import programs

jax = pytest.importorskip("jax")
pytestmark = pytest.mark.skipif(
    keras.backend.backend() != "jax", reason="compiles under JAX alone"
)


def _compiled(action):
    """Counts the functions that JAX compiles."""
    found = []

    def note(event, seconds, **kwargs):
        if event.endswith("backend_compile_duration"):
            found.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        action()
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    return len(found)


X = np.random.default_rng(0).normal(size=1000).astype("float32")
IN_16_BIT = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])


def _chained(half):
    """A chain without a sum of products, so nothing can be contracted."""
    return (half + 0.1) * (half - 0.3) / 7 * (half + 3)


def _contractible(half):
    return half * 3 + half * half


def _rounded(values, dtype):
    """Rounds to a dtype; returns float64 for further computation."""
    return values.astype(jax.numpy.dtype(dtype)).astype("float64")


def _is_allowed(found, dtype):
    """Returns which results of `_contractible` are rounded correctly.

    Both single ops and contracted ones are allowed: an instruction that
    multiplies and adds rounds once, after the addition.
    """
    half = _rounded(X, dtype)
    triple, square = half * 3, half * half
    ways = [
        _rounded(triple, dtype) + _rounded(square, dtype),
        _rounded(triple, dtype) + square,
        triple + _rounded(square, dtype),
    ]
    return np.any([found == _rounded(way, dtype) for way in ways], axis=0)


def _in_16_bit(steps, dtype):
    return lambda x: ops.cast(steps(ops.cast(x, dtype)), "float32")


@IN_16_BIT
def test_every_16_bit_value_is_rounded_as_op_by_op(dtype):
    steps, x = _in_16_bit(_chained, dtype), ops.convert_to_tensor(X)
    runner = programs.runner()
    assert runner.compiles
    np.testing.assert_array_equal(runner.run(steps, x), steps(x))


@IN_16_BIT
def test_a_product_that_is_added_may_be_rounded_with_the_sum(dtype):
    steps, x = _in_16_bit(_contractible, dtype), ops.convert_to_tensor(X)
    found = programs.runner().run(steps, x)
    assert _is_allowed(np.asarray(found), dtype).all()


@IN_16_BIT
def test_float32_in_between_would_show(dtype):
    wide = _contractible(_rounded(X, dtype).astype("float32"))
    assert not _is_allowed(_rounded(wide, dtype), dtype).all()


def _behind_an_input(add):
    return lambda x: add(x)


def _in_a_loop(add):
    return lambda x: jax.lax.fori_loop(0, 2, lambda _, at: add(at), x)


def _in_a_branch(add):
    return lambda x: jax.lax.cond(x.sum() > 0, add, lambda x: x, x)


@pytest.mark.parametrize(
    "around", [_behind_an_input, _in_a_loop, _in_a_branch, jax.checkpoint]
)
def test_arrays_inside_compiled_functions_are_distinguished(around):
    runner, x = programs.Runner(compiles=True), ops.ones((3,))
    for shift in (1.0, 2.0):
        array = np.full((3,), shift, "float32")
        function = around(jax.jit(lambda x, array=array: x + array))
        np.testing.assert_array_equal(runner.run(function, x), function(x))


def test_equal_functions_are_compiled_once():
    runner, x = programs.Runner(compiles=True), ops.ones((3,))

    def of(shift):
        return lambda x: ops.exp(x) + shift

    def both():
        runner.run(of(ops.full((3,), 1.0)), x)
        runner.run(of(ops.full((3,), 2.0)), x)

    runner.run(of(ops.full((3,), 0.0)), x)
    ops.full((3,), 1.0)
    assert _compiled(both) == 0
    np.testing.assert_array_equal(
        runner.run(of(ops.full((3,), 5.0)), x), ops.exp(x) + 5.0
    )


def test_deeper_models_compile_no_more_functions():
    def model(depth):
        each = [keras.layers.Dense(8, "relu") for _ in range(depth)]
        return keras.Sequential([keras.Input((8,)), *each])

    x, y = np.ones((4, 8), "float32"), np.ones((4, 8), "float32")

    def checks(depth):
        tested = model(depth)
        return _compiled(lambda: tfmix.check(tested, x, y, loss="mse"))

    checks(2)
    # These are the model in 16 bit, in float32 forward and backward, and three
    # kinds of layers.
    assert checks(9) <= 10
