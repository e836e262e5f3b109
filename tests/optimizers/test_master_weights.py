"""Master weights are exact, are used everywhere and are never stale."""

import contextlib

import keras
import numpy as np
import pytest
from keras import ops

from tests import helpers
from tests.optimizers import sixteen_bit
from tfmix.optimizers import master_weights

Masters = master_weights.MasterWeightOptimizer


@pytest.mark.costly
@pytest.mark.parametrize("name", helpers.optimizers_of_a_kind())
def test_masters_are_the_inner_optimizers_own_float32_run(name):
    old = not hasattr(keras.optimizers, "MultiOptimizer")
    if name == "Muon" and old and not helpers.ON_JAX:
        pytest.skip("Muon of Keras 3.12 fails by itself under TensorFlow")
    # A program of XLA's rounds a product and a sum once where another rounds
    # twice, so under JAX each operation runs on its own, which takes longer.
    steps = sixteen_bit.gradients(10 if helpers.ON_JAX else 200)
    with op_by_op():
        expected = sixteen_bit.variables("float32")
        sixteen_bit.run(helpers.make_optimizer(name), expected, steps)
        stored = sixteen_bit.variables("bfloat16")
        optimizer = Masters(helpers.make_optimizer(name))
        sixteen_bit.run(optimizer, stored, steps)
        masters = [optimizer.read_float32(variable) for variable in stored]
        assert sixteen_bit.bits_of(masters) == sixteen_bit.bits_of(expected)


def op_by_op():
    if not helpers.ON_JAX:
        return contextlib.nullcontext()
    import jax

    return jax.disable_jit()


@pytest.mark.costly
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_variables_are_the_rounded_masters(dtype):
    stored = sixteen_bit.variables(dtype)
    optimizer = Masters("adam")
    sixteen_bit.run(optimizer, stored, sixteen_bit.gradients(3))
    rounded = [ops.cast(optimizer.read_float32(v), dtype) for v in stored]
    assert sixteen_bit.bits_of(rounded) == sixteen_bit.bits_of(stored)


@pytest.mark.costly
@pytest.mark.parametrize("way", sixteen_bit.WAYS)
def test_small_updates_add_up(way):
    weight = keras.Variable(np.ones(4096), dtype="bfloat16", name="w")
    optimizer = sixteen_bit.WAYS[way](keras.optimizers.SGD(2.0**-12))
    optimizer.build([weight])
    gradient = np.ones(4096, "float32")
    sixteen_bit.run(optimizer, [weight], [[gradient]] * 512)
    # 512 updates of 1/4096 are 1/8, but rounding would lose each of them. The
    # mean of stochastic rounding has a standard error of 3e-4 at most.
    mean = float(np.mean(ops.convert_to_numpy(ops.cast(weight, "float32"))))
    assert mean == pytest.approx(0.875, abs=2e-3)


@pytest.mark.costly
@pytest.mark.parametrize("way", sixteen_bit.WAYS)
def test_masters_follow_weights_assigned_later(way):
    steps = sixteen_bit.gradients(3)
    used = sixteen_bit.variables("bfloat16")
    optimizer = sixteen_bit.WAYS[way](keras.optimizers.SGD(0.1))
    sixteen_bit.run(optimizer, used, steps)
    for variable, loaded in zip(
        used, sixteen_bit.variables("bfloat16", seed=5), strict=True
    ):
        variable.assign(loaded)
    assert_within_half_a_step(optimizer, used)
    sixteen_bit.run(optimizer, used, [[0 * g for g in steps[0]]])
    loaded = sixteen_bit.variables("bfloat16", seed=5)
    assert sixteen_bit.bits_of(used) == sixteen_bit.bits_of(loaded)
    values = [optimizer.read_float32(v) for v in used]
    if way == "stochastic":
        assert sixteen_bit.bits_of(values) == sixteen_bit.bits_of(loaded)


def assert_within_half_a_step(optimizer, variables):
    for variable in variables:
        value = optimizer.read_float32(variable)
        rounded = ops.cast(ops.cast(value, "bfloat16"), "float32")
        helpers.assert_close(rounded, ops.cast(variable, "float32"), "float32")


def test_variables_that_are_not_16_bit_have_no_masters():
    narrow = keras.Variable(np.ones(2), dtype="bfloat16", name="narrow")
    wide = keras.Variable(np.ones(3), dtype="float32", name="wide")
    optimizer = Masters(keras.optimizers.SGD(0.5))
    optimizer.build([narrow, wide])
    optimizer.apply([np.ones(2, "float32"), np.ones(3, "float32")])
    masters = [v.name for v in optimizer.variables if v.name == "narrow"]
    assert masters == ["narrow"]
    np.testing.assert_array_equal(ops.convert_to_numpy(wide), [0.5] * 3)


@pytest.mark.costly
@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_accumulation_steps": 2},
        {"use_ema": True, "ema_momentum": 0.5},
        {"clipvalue": 0.5},
        {"weight_decay": 0.01},
    ],
    ids=str,
)
def test_settings_of_the_inner_optimizer_act_as_in_float32(settings):
    steps = sixteen_bit.gradients(6)
    expected = sixteen_bit.variables("float32")
    plain = keras.optimizers.SGD(0.1, momentum=0.9, **settings)
    sixteen_bit.run(plain, expected, steps)
    plain.finalize_variable_values(expected)
    stored = sixteen_bit.variables("bfloat16")
    optimizer = Masters(keras.optimizers.SGD(0.1, momentum=0.9, **settings))
    sixteen_bit.run(optimizer, stored, steps)
    optimizer.finalize_variable_values(stored)
    masters = [optimizer.read_float32(v) for v in stored]
    for got, wanted in zip(masters, expected, strict=True):
        helpers.assert_close(got, wanted, "float32")
    values = [ops.cast(v, "float32") for v in stored]
    for got, wanted in zip(values, expected, strict=True):
        helpers.assert_close(got, wanted, "bfloat16")


def test_a_map_of_optimizers_finds_the_paths_of_the_model():
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        pytest.skip("needs a Keras with MultiOptimizer, 3.13 or newer")
    fast = keras.Variable(np.ones(2), dtype="bfloat16", name="fast")
    slow = keras.Variable(np.ones(2), dtype="bfloat16", name="slow")
    sgd = keras.optimizers.SGD
    choice = keras.optimizers.OptimizerMap(sgd(0.25), {"fast": sgd(0.5)})
    inner = keras.optimizers.MultiOptimizer(choice)
    optimizer = Masters(inner)
    optimizer.build([fast, slow])
    optimizer.apply([np.ones(2, "float32")] * 2)
    assert (float(fast[0]), float(slow[0])) == (0.5, 0.75)


def refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def keras_scaled():
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())


@pytest.mark.parametrize(
    ("inner", "error", "message"),
    [
        (
            keras_scaled,
            ValueError,
            r"LossScaleOptimizer\(MasterWeightOptimizer",
        ),
        (lambda: 3, TypeError, "inner_optimizer=3 of type int"),
        (lambda: "no_such", ValueError, "no_such"),
    ],
)
def test_an_optimizer_that_cannot_be_wrapped_is_refused(inner, error, message):
    optimizer = inner()
    refused(lambda: Masters(optimizer), error, message)


def built_in_a_map():
    used = keras.optimizers.SGD()
    used.build([keras.Variable([1.0])])
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        return used
    choice = keras.optimizers.OptimizerMap(used)
    return keras.optimizers.MultiOptimizer(choice)


def test_a_built_optimizer_is_refused():
    stored = sixteen_bit.variables("bfloat16")
    inner = keras.optimizers.SGD()
    late = Masters(inner)
    inner.build(stored)
    message = "(?i)'sgd', which is built already"
    refused(lambda: late.build(stored), ValueError, "is built already")
    refused(lambda: Masters(inner), ValueError, message)
    refused(lambda: Masters(built_in_a_map()), ValueError, "is built already")


def test_unknown_variables_and_wrong_counts_are_refused():
    stored = sixteen_bit.variables("bfloat16")
    optimizer = Masters("sgd")
    optimizer.build(stored)
    stranger = keras.Variable([1.0], dtype="bfloat16")
    one = [np.ones(1, "float32")]
    refused(lambda: optimizer.apply(one, [stranger]), ValueError, "nknown")
    counts = f"1 gradients for {len(stored)}"
    refused(lambda: optimizer.apply(one), ValueError, counts)
    fresh = Masters("sgd")
    refused(lambda: fresh.apply(one), ValueError, "trainable_variables=None")
    refused(lambda: optimizer.read_float32(stranger), ValueError, "nknown")
