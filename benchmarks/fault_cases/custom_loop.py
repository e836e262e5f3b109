"""Faults of training loops that a user writes by hand."""

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from benchmarks.fault_cases import loops, words
from benchmarks.fault_cases.record import TENSORFLOW_ONLY, Outcome, fault

_ONES = np.float32([1.0, 1.0])


@fault()
def forgotten_scale_loss(system: Any) -> Outcome:
    """A loop without `scale_loss`: 10 steps with gradient 1, lr 0.1."""
    variable, optimizer = loops.wrapped_vector(system)
    with words.heard() as said:
        for _ in range(10):
            loops.apply(optimizer, [ops.convert_to_tensor(_ONES)], [variable])
    told = [text for text in said if "scale_loss" in text]
    moved = 1.0 - float(words.to_numpy(variable)[0])
    return Outcome(
        bool(np.isclose(moved, 1.0, rtol=0.01)),
        f"weight moved by {moved:.2g} (right: 1), {len(told)} warning(s)",
        told=len(told) == 1,
    )


@fault()
def double_wrapping(system: Any) -> Outcome:
    """An optimizer that scales the loss is wrapped again."""
    variable = system.variable(_ONES)
    try:
        optimizer = system.wrap(system.wrap(keras.optimizers.SGD(0.1)))
    except (TypeError, ValueError) as error:
        named = "LossScaleOptimizer" in str(error)
        return Outcome(False, f"refused: {str(error)[:70]}", named)
    optimizer.build([variable])
    loops.step(optimizer, [variable], [_ONES])
    return words.weight_is(variable, [0.9, 0.9], "accepted")


@fault(TENSORFLOW_ONLY)
def traced_before_build(system: Any) -> Outcome:
    """The gradient function is traced before the optimizer is built."""
    import tensorflow as tf

    variable = system.variable(_ONES)
    optimizer = system.wrap(keras.optimizers.SGD(0.1), initial_scale=1024.0)

    @tf.function
    def gradient() -> Any:
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(tf.reduce_sum(variable.value))
        return tape.gradient(loss, variable.value)

    gradient()
    optimizer.build([variable])
    for factor in (np.inf, np.inf, np.inf, 1.0):
        loops.apply(optimizer, [gradient() * factor], [variable])
    return words.weight_is(variable, [0.9, 0.9], "after 3 skips and a step")


def _step_with(
    change: Callable[[Any], Any], system: Any, gradient: list[float]
) -> tuple[Any, Any]:
    """Runs a step of a loop that unscales its gradient and changes it."""
    variable, optimizer = loops.wrapped_vector(system)
    scaled = optimizer.scale_loss(ops.convert_to_tensor(gradient))
    (own,) = system.unscale(optimizer, [scaled])
    loops.apply(optimizer, [change(own)], [variable], **system.unscaled)
    return variable, optimizer


@fault()
def clip_hides_infinity(system: Any) -> Outcome:
    """The loop clips by value, which turns an infinity into a 1."""
    variable, optimizer = _step_with(
        lambda gradient: ops.clip(gradient, -1, 1), system, [np.inf, 0.25]
    )
    return words.weight_is(
        variable,
        [1.0, 2.0],
        words.progress(optimizer, 1),
        words.skipped(optimizer, 1) == 1,
    )


@fault()
def clip_by_norm(system: Any) -> Outcome:
    """The loop clips the global norm of its gradients to 1."""
    variable, _ = _step_with(
        lambda gradient: gradient / ops.maximum(ops.norm(gradient), 1.0),
        system,
        [3.0, 4.0],
    )
    return words.weight_is(variable, [0.94, 1.92])


@fault()
def unscaled_for_a_log(system: Any) -> Outcome:
    """The loop unscales its gradients only to log their norm."""
    variable, optimizer = loops.wrapped_vector(system)
    scaled = [optimizer.scale_loss(ops.convert_to_tensor([3.0, 4.0]))]
    (true,) = system.unscale(optimizer, scaled)
    norm = float(words.to_numpy(ops.norm(true)))
    loops.apply(optimizer, scaled, [variable])
    logged = f"the logged norm is {norm:.3g} (right: 5)"
    return words.weight_is(variable, [0.7, 1.6], logged, abs(norm - 5.0) < 1e-3)


@fault()
def float16_loss(system: Any) -> Outcome:
    """A float16 loss of 3.0 is scaled before the optimizer is built."""
    optimizer = system.wrap(keras.optimizers.SGD(0.1))
    scaled = optimizer.scale_loss(ops.convert_to_tensor(np.float16(3.0)))
    value = float(words.to_numpy(scaled))
    dtype = keras.backend.standardize_dtype(scaled.dtype)
    text = f"scaled loss {value:g} in {dtype} (right: 98304)"
    return Outcome(value == 98304.0, text)


@fault()
def two_optimizers(system: Any) -> Outcome:
    """A GAN step: the generator's gradients overflow, not the critic's."""
    critic, critic_optimizer = loops.wrapped_vector(system)
    generator, generator_optimizer = loops.wrapped_vector(system)
    before = words.to_numpy(generator)
    for factor in (0.0, np.inf, 0.0):
        loops.step(critic_optimizer, [critic], [_ONES])
        loops.step(generator_optimizer, [generator], [_ONES * factor])
    return words.weight_is(
        critic,
        [0.7, 1.7],
        f"critic: {words.progress(critic_optimizer, 3)}; "
        f"generator: {words.progress(generator_optimizer, 3)}",
        words.same([before], [words.to_numpy(generator)]),
    )


def _steps_of_two(
    system: Any, second: Any, steps: list[tuple[float, Any]]
) -> Any:
    """Trains a weight by scaled gradients beside a second variable."""
    first = system.variable(_ONES)
    optimizer = system.wrap(keras.optimizers.SGD(0.1))
    optimizer.build([first, second])
    with warnings.catch_warnings():
        # Keras warns about a missing gradient, which is intended here.
        warnings.simplefilter("ignore")
        for factor, other in steps:
            gradient = ops.convert_to_tensor(_ONES * np.float32(factor))
            gradients = [optimizer.scale_loss(gradient), other]
            loops.apply(optimizer, gradients, [first, second])
    return first


@fault()
def variable_without_gradient(system: Any) -> Outcome:
    """One of two variables gets no gradient, also in a bad step."""
    unused = system.variable(_ONES)
    steps = [(1.0, None), (np.inf, None), (1.0, None)]
    return words.weight_is(
        _steps_of_two(system, unused, steps),
        [0.8, 0.8],
        f"the other {words.vector(unused)} (right: [1 1])",
        (words.to_numpy(unused) == 1.0).all(),
    )


@fault()
def overwrite_with_gradient(system: Any) -> Outcome:
    """A variable overwritten by its gradient (float8), also in a bad step."""
    amax = keras.Variable(_ONES)
    amax.overwrite_with_gradient = True
    new = ops.convert_to_tensor(7 * _ONES)
    weight = _steps_of_two(system, amax, [(1.0, new), (np.inf, 2 * new)])
    return words.weight_is(
        weight,
        [0.9, 0.9],
        f"overwritten variable {words.vector(amax)} (right: [7 7])",
        np.allclose(words.to_numpy(amax), 7.0),
    )


@fault()
def old_method_names(system: Any) -> Outcome:
    """A loop of old tf.keras: get_scaled_loss, get_unscaled_gradients."""
    variable, optimizer = loops.wrapped_vector(system)
    scaled = optimizer.get_scaled_loss(ops.convert_to_tensor(_ONES))
    grads = optimizer.get_unscaled_gradients([scaled])
    optimizer.apply_gradients(zip(grads, [variable], strict=True))
    return words.weight_is(variable, [0.9, 1.9])


@fault()
def inner_methods(system: Any) -> Outcome:
    """`exclude_from_weight_decay` is called on the wrapper."""
    bias = system.variable(_ONES, "bias")
    optimizer = system.wrap(keras.optimizers.AdamW(0.1, weight_decay=0.5))
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    optimizer.build([bias])
    loops.step(optimizer, [bias], [0 * _ONES])
    return words.weight_is(bias, [1.0, 1.0])
