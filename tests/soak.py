"""A long run with random faults, and an oracle for its loss scale."""

import dataclasses

import keras
import numpy as np

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


def loss(table_rows, kernel, bias):
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
