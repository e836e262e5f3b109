"""Faults of the loss scale itself: its range and what a file may hold."""

import math
from typing import Any

import keras
import numpy as np

from benchmarks.fault_cases import loops, words
from benchmarks.fault_cases.record import Fault, Outcome, fault

_BAD = np.float32([np.inf, 1.0])
_GOOD = np.float32([1.0, 1.0])
_RECOVERY_STEPS = 20


@fault()
def bad_stretch(system: Any) -> Outcome:
    """150 bad steps, then a good one."""
    variable, optimizer = loops.wrapped_vector(system)
    for _ in range(150):
        loops.step(optimizer, [variable], [_BAD])
    scale = words.scale(optimizer)
    loops.step(optimizer, [variable], [_GOOD])
    said = f"scale {scale:.3g} before the good step"
    return words.weight_is(variable, [0.9, 1.9], said)


def _stored(value: float) -> Fault:
    def provoke(system: Any) -> Outcome:
        variable, optimizer = loops.wrapped_vector(system)
        optimizer.dynamic_scale.assign(value)
        for _ in range(_RECOVERY_STEPS):
            loops.step(optimizer, [variable], [_GOOD])
        skipped = words.skipped(optimizer, _RECOVERY_STEPS)
        alive = words.finite([variable]) and skipped == 0
        return Outcome(
            alive,
            f"{words.weights([variable])}, "
            f"{words.progress(optimizer, _RECOVERY_STEPS)}",
        )

    title = f"The stored scale is {value:g}; 20 good steps follow"
    return Fault(f"stored-scale-{value:g}", title, provoke)


STORED_ZERO, STORED_INFINITY, STORED_NAN = map(
    _stored, (0.0, math.inf, math.nan)
)


@fault()
def zero_gradients(system: Any) -> Outcome:
    """200 steps of zero gradients, growth after each, then 20 good steps."""
    variable, optimizer = loops.wrapped_vector(system, dynamic_growth_steps=1)
    # The scale of 2**15 would leave float32's range after 113 of them.
    for _ in range(200):
        loops.step(optimizer, [variable], [np.zeros(2, "float32")])
    before = int(optimizer.iterations)
    scale = words.scale(optimizer)
    for _ in range(_RECOVERY_STEPS):
        loops.step(optimizer, [variable], [_GOOD])
    applied = int(optimizer.iterations) - before
    return Outcome(
        applied == _RECOVERY_STEPS and math.isfinite(scale),
        f"scale {scale:g}, then {applied} of {_RECOVERY_STEPS} good steps "
        "applied",
    )


@fault()
def fixed_scale_overflow(system: Any) -> Outcome:
    """A fixed loss scale of 1024 meets one infinite gradient."""
    variable = system.variable([1.0, 2.0])
    optimizer = system.fixed(keras.optimizers.SGD(0.1, momentum=0.9), 1024.0)
    optimizer.build([variable])
    loops.step(optimizer, [variable], [_BAD])
    loops.step(optimizer, [variable], [_GOOD])
    alive = words.finite(optimizer.variables)
    said = "after a bad and a good step"
    return words.weight_is(variable, [0.9, 1.9], said, alive)


@fault()
def senseless_setting(system: Any) -> Outcome:
    """An initial scale of -5 and growth after 2.5 steps are asked for."""
    refused = []
    for name, value in [("initial_scale", -5), ("dynamic_growth_steps", 2.5)]:
        try:
            system.wrap(keras.optimizers.SGD(0.1), **{name: value})
        except (TypeError, ValueError) as error:
            refused.append(str(value) in str(error))
    return Outcome(
        False,
        f"{len(refused)} of 2 refused, {sum(refused)} with the value named",
        told=len(refused) == 2 and all(refused),
    )


@fault()
def nothing_applied(system: Any) -> Outcome:
    """Every batch overflows: does anything say so, and name the layer."""
    model = keras.Sequential(
        [
            keras.Input((2,), dtype="float32"),
            keras.layers.Dense(4, name="body", dtype=system.layers),
            keras.layers.Dense(1, name="head", dtype=system.layers),
        ]
    )
    model.compile(system.wrap(keras.optimizers.SGD(0.01)), loss="mse")
    system.guard(model)
    x, y = np.ones((80, 2)), np.full((80, 1), np.inf)
    told = ""
    try:
        model.fit(x, y, batch_size=1, verbose=0, callbacks=system.callbacks())
    except RuntimeError as error:
        told = str(error)
    skipped = words.progress(model.optimizer, 80)
    if not told:
        return Outcome(False, f"{skipped}; fit ends without a word")
    named = "head/kernel" in told or "head/bias" in told
    return Outcome(False, f"fit stops: {told.splitlines()[0][:90]}", named)
