"""An unwrapped optimizer skips steps that are not finite."""

import keras
import numpy as np
import pytest
from keras import ops

import tfmix
from tests import helpers, steps
from tfmix.tools.diagnostics.skip_report import counts_of_model

START = np.ones((3,), "float32")
LOW = tfmix.optimizers.LowMemoryOptimizer
MASTERS = tfmix.optimizers.MasterWeightOptimizer


def stepper(optimizer, weights, mode):
    """Returns a step of a loop that does not use tfmix."""
    step = steps.stepper(optimizer, weights, mode)
    return lambda *gradients: step(gradients)


def state(optimizer, weights):
    return helpers.snapshot([*weights, *optimizer.variables])


# The wrapper of tfmix, the dtype of the weights, and the policy.
KINDS = {
    "8 bits": (LOW, "float32", "mixed_float16"),
    "masters": (MASTERS, "float16", "float16"),
    "rounding": (tfmix.optimizers.BFloat16Optimizer, "bfloat16", "bfloat16"),
}


@pytest.mark.parametrize(
    ("kind", "mode"),
    [(kind, mode) for kind in ("8 bits", "masters") for mode in steps.MODES]
    + [(kind, steps.MODES[1]) for kind in ("rounding",)],
)
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_bad_step_leaves_no_trace(kind, mode, bad, said):
    wrapper, dtype, policy = KINDS[kind]
    tfmix.set_global_policy(policy)
    weights = [keras.Variable(START, dtype=dtype) for _ in range(2)]
    average = {} if kind == "rounding" else {"use_ema": True}
    optimizer = wrapper(keras.optimizers.Adam(0.1, **average))
    step = stepper(optimizer, weights, mode)
    step(START, 2 * START)
    before = state(optimizer, weights)
    step(START, np.float32([1.0, bad, 1.0]))
    helpers.assert_unchanged([*weights, *optimizer.variables], before)
    step(START, START)
    assert int(optimizer.iterations.numpy()) == 2
    assert weights[1].numpy().astype("float32").max() < 0.9
    assert not said


@pytest.mark.costly
@pytest.mark.parametrize("mode", steps.MODES)
def test_a_warning_says_that_16_bit_weights_need_masters(mode, said):
    tfmix.set_global_policy("bfloat16")
    weights = [keras.Variable(START, dtype="bfloat16")]
    step = stepper(keras.optimizers.Adam(0.1), weights, mode)
    step(START)
    step(START)
    (text,) = said
    assert "tfmix.optimizers.MasterWeightOptimizer(Adam(...))" in text


# A function that JAX compiles counts nothing.
@pytest.mark.costly
@pytest.mark.parametrize("mode", [m for m in steps.MODES if m != "jit"])
def test_skips_in_a_row_end_with_a_step_that_is_applied(mode):
    tfmix.set_global_policy("mixed_float16")
    weights = [keras.Variable(START), keras.Variable(START)]
    model = keras.Model()
    model.own = keras.optimizers.SGD(0.1)
    step = stepper(model.own, weights, mode)
    counts = []
    for size in (np.nan, np.inf, 1.0, np.nan, 1.0):
        step(START, size * START)
        (skips,) = counts_of_model(model)
        counts.append((skips.skipped_steps, skips.consecutive_skips))
    assert counts == [(1, 1), (2, 2), (2, 0), (3, 1), (3, 0)]
    assert [*skips.overflow_counts.values()] == [0, 3]


@helpers.requires_backend("tensorflow")
def test_a_good_eager_step_writes_nothing_that_keras_does_not_write(
    monkeypatch,
):
    # Keras's own tests of sparse gradients forbid it.
    tfmix.set_global_policy("mixed_float16")
    weights = [keras.Variable(START)]
    optimizer = keras.optimizers.SGD(0.1)
    step = stepper(optimizer, weights, "eager")
    step(START)
    kind, written = type(weights[0].value), []
    original = kind.assign

    def assign(variable, *args, **kwargs):
        written.append(variable)
        return original(variable, *args, **kwargs)

    monkeypatch.setattr(kind, "assign", assign)
    step(START)
    assert [v is optimizer.iterations.value for v in written] == [True]


def rows(value):
    """Returns a sparse gradient of two values for one row, which add up."""
    values = value * ops.ones((2, 2))
    if not helpers.ON_JAX:
        import tensorflow as tf

        rows, shape = tf.constant([3, 3]), tf.constant([5, 2])
        return tf.IndexedSlices(values, rows, shape)
    from jax.experimental import sparse

    return sparse.BCOO((values, np.array([[3], [3]])), shape=(5, 2))


@pytest.mark.every_case("eager steps look at the rows, compiled ones at sums")
@pytest.mark.parametrize("mode", steps.MODES)
def test_rows_that_are_not_finite_are_skipped(mode):
    tfmix.set_global_policy("mixed_float16")
    table = keras.Variable(np.ones((5, 2), "float32"))
    step = stepper(keras.optimizers.SGD(1.0), [table], mode)
    for value in (1.0, np.inf, 3e38):
        step(rows(np.float32(value)))
        assert table.numpy()[:, 0].tolist() == [1.0, 1.0, 1.0, -1.0, 1.0]


@helpers.requires_backend("tensorflow")
@pytest.mark.parametrize("is_built", [True, False])
@pytest.mark.parametrize("mode", steps.MODES)
def test_a_variable_of_tensorflow_is_stepped_like_one_of_keras(mode, is_built):
    import tensorflow as tf

    tfmix.set_global_policy("mixed_float16")
    weights = [tf.Variable(START), keras.Variable(START)]
    optimizer = keras.optimizers.SGD(0.1)
    if is_built:
        optimizer.build(weights)
    step = steps.compiled(
        lambda *gradients: optimizer.apply(gradients, weights), mode
    )
    for first in (START, np.inf * START, START):
        step(tf.constant(first), tf.constant(START))
    for weight in weights:
        np.testing.assert_allclose(weight.numpy(), START - 0.2, rtol=1e-6)


@helpers.requires_backend("tensorflow")
def test_a_built_optimizer_may_get_only_gradients():
    tfmix.set_global_policy("mixed_float16")
    weights = [keras.Variable(START), keras.Variable(START)]
    optimizer = keras.optimizers.SGD(1.0)
    optimizer.build(weights)
    optimizer.apply_gradients([(START, weights[1])])
    optimizer.apply([START, START])
    np.testing.assert_array_equal(weights[1].numpy(), START - 2)
