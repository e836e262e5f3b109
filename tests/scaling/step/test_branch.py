"""The step's conditional is one operation where one CPU holds all."""

import keras
import numpy as np
import pytest

if keras.backend.backend() != "tensorflow":
    pytest.skip("tf.cond is TensorFlow's own", allow_module_level=True)

import tensorflow as tf

from tfmix.scaling import optimizer as optimizers
from tfmix.scaling.step import branch

ATTRIBUTE = "_lower_using_switch_merge"


def counters(*devices):
    made = []
    for device in devices:
        with tf.device(device):
            made.append(keras.Variable(np.zeros((), "float32")))
    return made


def counting(variables):
    """Returns a function that counts up if its argument is positive."""

    def count():
        for variable in variables:
            variable.assign_add(1.0)
        return tf.constant(True)

    @tf.function
    def step(value):
        return branch.cond(
            value > 0, count, lambda: tf.constant(False), variables
        )

    return step


def is_whole(function, *arguments):
    graph = function.get_concrete_function(*arguments).graph
    kinds = ("If", "StatelessIf")
    (*_, last) = (op for op in graph.get_operations() if op.type in kinds)
    return not last.get_attr(ATTRIBUTE)


@pytest.mark.parametrize(
    ("devices", "whole"),
    [
        (("CPU:0", "CPU:0"), True),
        (("CPU:1",), True),
        (("CPU:0", "CPU:1"), False),
    ],
)
def test_it_is_whole_on_one_cpu_and_right_on_any(devices, whole):
    variables = counters(*devices)
    step = counting(variables)
    assert is_whole(step, tf.constant(1.0)) == whole
    assert [bool(step(tf.constant(sign))) for sign in (1.0, -1.0, 1.0)] == [
        True,
        False,
        True,
    ]
    assert [float(variable.numpy()) for variable in variables] == [2.0] * len(
        variables
    )


def test_large_variables_keep_it_open(monkeypatch):
    variables = counters("CPU:0", "CPU:0")
    monkeypatch.setattr(branch, "_LARGE", 1)
    step = counting(variables)
    assert not is_whole(step, tf.constant(1.0))
    assert bool(step(tf.constant(1.0)))


def test_eagerly_it_is_a_plain_choice():
    variables = counters("CPU:0")
    step = counting(variables).python_function
    assert bool(step(tf.constant(1.0)))
    assert not bool(step(tf.constant(-1.0)))
    assert float(variables[0].numpy()) == 1.0


@pytest.mark.parametrize("second", ["CPU:0", "CPU:1"])
def test_a_step_over_two_devices_is_taken_and_skipped(second):
    variables = counters("CPU:0", second)
    optimizer = optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(1.0), loss_scale=4.0
    )
    optimizer.build(variables)
    optimizer.scale_loss(1.0)

    @tf.function
    def step(gradient):
        optimizer.apply([gradient, gradient], variables)

    assert is_whole(step, tf.constant(4.0)) == (second == "CPU:0")
    step(tf.constant(4.0))
    step(tf.constant(np.inf, tf.float32))
    assert [float(v.numpy()) for v in variables] == [-1.0, -1.0]
    assert optimizer.skipped_steps == 1
