"""Thousands of steps with random faults break nothing."""

import dataclasses

import keras
import numpy as np
import pytest

import tfmix
from tests import helpers
from tfmix.loss_scaling import rules

RULE = rules.DynamicLossScale(
    initial_scale=2.0**8, growth_steps=15, min_scale=2.0**5, max_scale=2.0**11
)
ROWS, WIDTH = 12, 3
NUM_VARIABLES = 3
_FAULT_RATE = 0.05
_BAD_NUMBERS = np.float32([np.nan, np.inf, -np.inf])


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The faults of a run; each array has one entry per step."""

    bad: np.ndarray
    # The variable with a bad gradient; NUM_VARIABLES means all of them.
    variable: np.ndarray
    number: np.ndarray
    # True if the whole gradient is bad, false if only its first number is.
    whole: np.ndarray


def schedule(steps, seed):
    """Draws a fault for one step in twenty."""
    generator = np.random.default_rng(seed)
    return Schedule(
        bad=generator.random(steps) < _FAULT_RATE,
        variable=generator.integers(0, NUM_VARIABLES + 1, steps),
        number=generator.choice(_BAD_NUMBERS, steps),
        whole=generator.random(steps) < 0.5,
    )


def make_variables(system):
    """Returns a table, a kernel, a bias, and the optimizer built on them."""
    keras.utils.set_random_seed(4)
    shapes = {"table": (ROWS, WIDTH), "kernel": (WIDTH, 2), "bias": (2,)}
    variables = [
        keras.Variable(keras.random.normal(shape), name=name)
        for name, shape in shapes.items()
    ]
    optimizer = system(keras.optimizers.Adam(0.01, use_ema=True), RULE)
    optimizer.build(variables)
    return variables, optimizer


def loss_of(table_rows, kernel, bias):
    """A bounded loss, so that the run itself never overflows."""
    ops = keras.ops
    hidden = ops.tanh(ops.matmul(table_rows, kernel) + bias)
    return ops.mean(ops.square(hidden - 0.5))


def hit(gradient, index, fault):
    """Returns a gradient, with the fault of the step if there is one."""
    ops = keras.ops
    bad, variable, number, whole = fault
    mine = ops.logical_or(variable == index, variable == NUM_VARIABLES)
    count = int(np.prod(gradient.shape))
    first = ops.reshape(ops.arange(count) == 0, gradient.shape)
    where = ops.logical_and(
        ops.logical_and(bad, mine), ops.logical_or(whole, first)
    )
    return ops.where(where, number, gradient)


def oracle_scales(bad):
    """Returns the loss scale after each step, in plain Python."""
    scale, good_steps, scales = RULE.initial_scale, 0, []
    for is_bad in bad:
        good_steps = 0 if is_bad else good_steps + 1
        if is_bad:
            scale = max(scale / 2, RULE.min_scale)
        elif good_steps == RULE.growth_steps:
            scale, good_steps = min(scale * 2, RULE.max_scale), 0
        scales.append(scale)
    return np.float32(scales)


STEPS = [
    pytest.param(1_000, id="1000"),
    pytest.param(20_000, id="20000", marks=pytest.mark.slow),
]


def wrapped(inner, rule):
    return tfmix.LossScaleOptimizer(inner, loss_scale=rule)


def unprotected(inner, rule):
    """An unprotected optimizer with our interface, which must fail."""
    del rule
    inner.rule = RULE
    inner.scale_loss = lambda loss: loss
    return inner


def run_tensorflow(steps, system, seed=1):
    """Returns the state after each step of a compiled loop."""
    import tensorflow as tf

    variables, optimizer = make_variables(system)
    table, kernel, bias = variables
    faults = schedule(steps, seed)
    columns = [tf.constant(column) for column in vars(faults).values()]
    scale = getattr(optimizer, "dynamic_scale", tf.constant(1.0))

    def gradients(step, fault):
        # Each batch contains rows twice, so that sparse gradients add up.
        ids = tf.stack([step % ROWS, (step + 1) % ROWS] * 2)
        with tf.GradientTape() as tape:
            rows = tf.gather(table.value, ids)
            tape.watch(rows)
            loss = loss_of(rows, kernel.value, bias.value)
            loss = optimizer.scale_loss(loss)
        grads = tape.gradient(loss, [rows, kernel.value, bias.value])
        sparse, *dense = (hit(g, i, fault) for i, g in enumerate(grads))
        return [tf.IndexedSlices(sparse, ids, table.shape), *dense]

    @tf.function
    def loop():
        finite = tf.TensorArray(tf.bool, steps)
        applied = tf.TensorArray(tf.bool, steps)
        scales = tf.TensorArray(tf.float32, steps)
        for step in tf.range(steps):
            fault = [column[step] for column in columns]
            optimizer.apply(gradients(step, fault), variables)
            is_ours = isinstance(optimizer, tfmix.LossScaleOptimizer)
            result = optimizer.last_step_applied() if is_ours else True
            everything = [*variables, *optimizer.variables]
            finite = finite.write(step, tfmix.all_finite(everything))
            applied = applied.write(step, result)
            scales = scales.write(step, keras.ops.convert_to_tensor(scale))
        return finite.stack(), applied.stack(), scales.stack()

    result = [array.numpy() for array in loop()]
    return faults, optimizer, *result


def run_jax(steps, system, seed=1):
    """Runs the same in one `lax.scan`, with dense gradients."""
    import jax

    variables, optimizer = make_variables(system)
    faults = schedule(steps, seed)
    rows = np.arange(2)

    def scaled_loss(values, state, step):
        table, kernel, bias = values
        loss = loss_of(table[(rows + step) % ROWS], kernel, bias)
        mapping = zip(optimizer.variables, state, strict=True)
        with keras.StatelessScope(state_mapping=mapping):
            return optimizer.scale_loss(loss)

    def body(carry, now):
        values, state = carry
        step, fault = now
        grads = jax.grad(scaled_loss)(values, state, step)
        grads = [hit(g, i, fault) for i, g in enumerate(grads)]
        before = state
        values, state = optimizer.stateless_apply(state, grads, values)
        mapping = dict(zip(map(id, optimizer.variables), state, strict=True))
        count = mapping[id(optimizer.iterations)]
        old = dict(zip(map(id, optimizer.variables), before, strict=True))
        applied = count > old[id(optimizer.iterations)]
        scale = getattr(optimizer, "dynamic_scale", None)
        scale = 1.0 if scale is None else mapping[id(scale)]
        finite = tfmix.all_finite([*values, *state])
        return (list(values), list(state)), (finite, applied, scale)

    start = [v.value for v in variables], [v.value for v in optimizer.variables]
    inputs = np.arange(steps), tuple(vars(faults).values())
    scan = jax.jit(lambda carry: jax.lax.scan(body, carry, inputs))
    (_, state), result = scan(start)
    for variable, value in zip(optimizer.variables, state, strict=True):
        variable.assign(value)
    return faults, optimizer, *map(np.asarray, result)


def run(steps, system=wrapped):
    if keras.backend.backend() == "tensorflow":
        return run_tensorflow(steps, system)
    return run_jax(steps, system)


@pytest.mark.costly
@pytest.mark.parametrize("steps", STEPS)
def test_random_faults_leave_no_trace(steps):
    faults, optimizer, finite, applied, scales = run(steps)
    assert finite.all(), f"not finite after step {np.argmin(finite)}"
    np.testing.assert_array_equal(applied, ~faults.bad)
    np.testing.assert_array_equal(scales, oracle_scales(faults.bad))
    assert scales.min() >= RULE.min_scale
    assert scales.max() <= RULE.max_scale
    assert int(optimizer.iterations) == applied.sum()
    assert int(optimizer.iterations) + optimizer.skipped_steps == steps
    assert optimizer.skipped_steps == faults.bad.sum()
    places = range(NUM_VARIABLES + 1)
    hits = [(faults.variable[faults.bad] == place).sum() for place in places]
    assert min(hits) > 0
    counts = [hit + hits[NUM_VARIABLES] for hit in hits[:NUM_VARIABLES]]
    assert list(optimizer.overflow_counts.values()) == counts


@pytest.mark.slow
def test_the_long_soak_reaches_both_bounds():
    scales = oracle_scales(schedule(20_000, seed=1).bad)
    assert scales.min() == RULE.min_scale
    assert scales.max() == RULE.max_scale


@pytest.mark.costly
def test_the_soak_breaks_an_optimizer_that_skips_nothing():
    _, _, finite, _, _ = run(100, unprotected)
    assert not finite.all()


def test_the_oracle_follows_the_rule():
    bad = [False] * 14 + [True] + [False] * 15 + [True] * 9
    scales = oracle_scales(np.array(bad))
    assert scales[13] == 2.0**8
    assert scales[14] == 2.0**7
    assert scales[29] == 2.0**8
    assert scales[-1] == RULE.min_scale
    helpers.assert_all_finite([scales])
