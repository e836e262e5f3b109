"""Loss scales: pure rules that turn a step's outcome into the next scale."""

import abc
import dataclasses
import math
from typing import Any, NamedTuple

import keras
import numpy as np

from tfmix import _arguments
from tfmix._keras import variables


class LossScaleState(NamedTuple):
    """The state of a loss scale between two steps.

    Attributes:
        scale: Float32 scalar; read it with `LossScale.current(state)`.
        good_steps: Integer scalar, finite steps since the last change.
        overflows: Integer scalar, non-finite steps in a row.
    """

    scale: Any
    good_steps: Any = np.int32(0)
    overflows: Any = np.int32(0)


class LossScale(abc.ABC):
    """A rule for the loss scale: it holds only settings, not the state.

    Subclass it to train with a rule of your own and pass an instance as
    `LossScaleOptimizer(..., loss_scale=...)`. The laws:

    - `init()` returns a named tuple of scalars whose first field is `scale`;
      the optimizer keeps one variable for each field, so they are saved and
      restored with it.
    - `update(state, finite)` returns the next state and changes nothing else.
      It has to work on tensors inside a compiled step (`keras.ops.where`
      instead of `if`).
    - `current(state)` is positive and at most 2**100 for any state, and never
      below `lowest_scale` (0.0; from 1 on, XLA's check is cheaper).

    Examples:
        >>> class Halving(LossScale):
        ...     def init(self):
        ...         return LossScaleState(np.float32(1024.0))
        ...
        ...     def update(self, state, finite):
        ...         halved = self.current(state) / 2
        ...         return state._replace(scale=halved)
        >>> Halving().update(Halving().init(), True).scale
        np.float32(512.0)
    """

    @property
    def lowest_scale(self) -> float:
        """A lower bound of the scale.

        Dividing by one from 1 on makes no number infinite, so gradients can be
        checked before they are divided.
        """
        return 0.0

    @abc.abstractmethod
    def init(self) -> Any:
        """Returns the state before the first step, as NumPy scalars."""

    @abc.abstractmethod
    def update(self, state: Any, finite: Any) -> Any:
        """Returns the state after a step.

        Args:
            state: What `init` or the previous `update` returned.
            finite: Bool or boolean scalar tensor, whether the step was applied.
        """

    def current(self, state: Any) -> Any:
        """Returns the loss scale to use now, a positive finite scalar.

        If the stored value is unusable (0, negative, above 2**100 or NaN, as
        from the checkpoint of a failed run), it is the initial one.
        """
        stored = state.scale
        initial = self.init()[0]
        # Any comparison with NaN is false.
        is_usable = (stored > 0) & (stored <= _arguments.HIGHEST)
        return variables.select(is_usable, stored, initial)

    def get_config(self) -> dict:
        """Returns the settings as keyword arguments of the constructor."""
        return (
            dataclasses.asdict(self) if dataclasses.is_dataclass(self) else {}
        )

    @classmethod
    def from_config(cls, config: dict) -> "LossScale":
        """Returns the loss scale that `get_config` described."""
        return cls(**config)


@keras.saving.register_keras_serializable(package="tfmix")
@dataclasses.dataclass(frozen=True)
class DynamicLossScale(LossScale):
    """Halves the scale on an overflow, doubles it after many finite steps.

    The rule, for each step:

        finite:      good_steps += 1
                     if good_steps == growth_steps:
                         scale = min(scale * growth_factor, max_scale)
                         good_steps = 0
        not finite:  good_steps = 0
                     if this is the hysteresis-th overflow in a row, or later:
                         scale = max(scale * backoff_factor, min_scale)

    Method: Micikevicius et al., "Mixed Precision Training", 2018
    (arXiv:1710.03740), with bounds and hysteresis as in Apex and Megatron-LM.

    Args:
        initial_scale: Float. Defaults to `2.0**15`, like Keras. A scale that is
            too high falls in a few steps; one that is too low needs
            `growth_steps` for each doubling.
        growth_factor: Float above 1. Defaults to `2.0`, which keeps the scale
            a power of two, so that scaling never rounds. A factor close to 1
            with `growth_steps=1` grows log-additively.
        backoff_factor: Float between 0 and 1. Defaults to `0.5`.
        growth_steps: Integer, finite steps in a row before the scale grows.
            Defaults to `2000`: on average one step in 2,000 is then spent on
            finding the limit.
        hysteresis: Integer, overflows in a row before the scale shrinks.
            Defaults to `1`. Larger values ride out single bad batches.
        min_scale: Float, the floor. Defaults to `1.0`: a scale of 1 does
            not cause an overflow. May be below 1 for losses that are huge.
        max_scale: Float, the ceiling. Defaults to `2.0**24`: beyond it a
            scale no longer saves any float16 value from underflow.

    Raises:
        TypeError, ValueError: If a value is not a number, or out of range.

    Examples:
        >>> rule = DynamicLossScale(initial_scale=8.0, growth_steps=2)
        >>> state = rule.update(rule.init(), False)
        >>> float(state.scale)
        4.0
        >>> float(rule.update(rule.update(state, True), True).scale)
        8.0
    """

    initial_scale: float = 2.0**15
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_steps: int = 2000
    hysteresis: int = 1
    min_scale: float = 1.0
    max_scale: float = 2.0**24

    def __post_init__(self) -> None:
        """Checks every setting and stores it as a plain number."""
        for names, checked in (
            (("min_scale", "max_scale", "initial_scale"), _arguments.positive),
            (("growth_steps", "hysteresis"), _arguments.count),
            (("growth_factor", "backoff_factor"), _arguments.number),
        ):
            for name in names:
                _store(self, name, checked(name, getattr(self, name)))
        if not 1.0 < self.growth_factor < math.inf:
            raise ValueError(
                "`growth_factor` must be a finite number above 1, such as "
                f"2.0. Received: growth_factor={self.growth_factor!r}."
            )
        if not 0.0 < self.backoff_factor < 1.0:
            raise ValueError(
                "`backoff_factor` must lie between 0 and 1, such as 0.5. "
                f"Received: backoff_factor={self.backoff_factor!r}."
            )
        if not self.min_scale <= self.initial_scale <= self.max_scale:
            raise ValueError(
                "`initial_scale` must lie between `min_scale` and "
                f"`max_scale`. Received: initial_scale={self.initial_scale!r}, "
                f"min_scale={self.min_scale!r}, max_scale={self.max_scale!r}. "
                "Move the bound, as in DynamicLossScale(initial_scale="
                f"{self.initial_scale!r}, min_scale=..., max_scale=...)."
            )

    @property
    def lowest_scale(self) -> float:
        """The floor."""
        return self.min_scale

    def init(self) -> LossScaleState:
        """Returns the state before the first step."""
        return LossScaleState(np.float32(self.initial_scale))

    def current(self, state: Any) -> Any:
        """Returns the stored scale inside the bounds; the highest if NaN."""
        stored = state.scale
        low, high = np.float32(self.min_scale), np.float32(self.max_scale)
        # Any comparison with NaN is false. From the highest it falls by itself.
        raised = variables.select(stored >= low, stored, low)
        return variables.select(stored <= high, raised, high)

    def update(self, state: Any, finite: Any) -> LossScaleState:
        """Returns the state after a step; see the class for the rule."""
        scale = self.current(state)
        good_steps, overflows = state.good_steps + 1, state.overflows + 1
        # An object that is in both states needs no operation that selects.
        zero = good_steps * 0
        good = variables.select(
            good_steps >= self.growth_steps,
            LossScaleState(scale * self.growth_factor, zero, zero),
            LossScaleState(scale, good_steps, zero),
        )
        bad = variables.select(
            overflows >= self.hysteresis,
            LossScaleState(scale * self.backoff_factor, zero, overflows),
            LossScaleState(scale, zero, overflows),
        )
        # It may lie outside of the bounds until it is read.
        return variables.select(finite, good, bad)


class _ConstantLossScale(LossScale):
    """A scale that keeps its first value."""

    scale = 1.0

    def init(self) -> LossScaleState:
        """Returns the state before the first step."""
        return LossScaleState(np.float32(self.scale))

    @property
    def lowest_scale(self) -> float:
        """The first scale."""
        return float(self.init()[0])

    def current(self, state: Any) -> Any:
        """Returns the first scale, whatever the state holds."""
        return self.init()[0]

    def update(self, state: Any, finite: Any) -> LossScaleState:
        """Returns the state with the first scale restored."""
        return state._replace(scale=self.current(state))


@keras.saving.register_keras_serializable(package="tfmix")
@dataclasses.dataclass(frozen=True)
class FixedLossScale(_ConstantLossScale):
    """A scale that never changes; steps that overflow are still skipped.

    Args:
        scale: Float, the loss scale. Defaults to `128.0`, MXNet's and
            MindSpore's. Powers of two keep scaling exact.

    Raises:
        TypeError, ValueError: If `scale` is not a positive, finite number.

    Examples:
        >>> float(FixedLossScale(512.0).init().scale)
        512.0
    """

    scale: float = 128.0

    def __post_init__(self) -> None:
        """Checks the scale and stores it as a plain number."""
        _store(self, "scale", _arguments.positive("scale", self.scale))


@keras.saving.register_keras_serializable(package="tfmix")
@dataclasses.dataclass(frozen=True)
class NoLossScale(_ConstantLossScale):
    """A scale of one: only the check and the skip of bad steps remain.

    Use it in float32 and bfloat16, where gradients need no scaling but a bad
    batch can still make them infinite.

    Examples:
        >>> float(NoLossScale().init().scale)
        1.0
    """


def is_constant(rule: LossScale) -> bool:
    """Returns whether a scale stays as it is."""
    return isinstance(rule, _ConstantLossScale)


def _store(loss_scale: LossScale, name: str, value: float | int) -> None:
    # This is the documented way to set a field of a frozen dataclass.
    object.__setattr__(loss_scale, name, value)


def from_arguments(
    loss_scale: Any, initial_scale: Any, dynamic_growth_steps: Any
) -> LossScale:
    """Returns the rule that three constructor arguments describe."""
    given = {} if initial_scale is None else {"initial_scale": initial_scale}
    if dynamic_growth_steps is not None:
        given["growth_steps"] = _arguments.count(
            "dynamic_growth_steps", dynamic_growth_steps
        )
    if isinstance(loss_scale, dict):
        loss_scale = keras.saving.deserialize_keras_object(loss_scale)
    if isinstance(loss_scale, str) and loss_scale == "dynamic":
        return DynamicLossScale(**given)
    if given:
        raise ValueError(
            "`initial_scale` and `dynamic_growth_steps` are settings of the "
            "dynamic rule and would be ignored beside another one. Received: "
            f"initial_scale={initial_scale!r}, dynamic_growth_steps="
            f"{dynamic_growth_steps!r}, loss_scale={loss_scale!r}. Write "
            "loss_scale=tfmix.DynamicLossScale(initial_scale=..., "
            "growth_steps=...), or leave the two out."
        )
    if isinstance(loss_scale, LossScale):
        return loss_scale
    if isinstance(loss_scale, str) or loss_scale is None:
        raise ValueError(
            '`loss_scale` must be "dynamic", a positive number or a '
            f"tfmix.loss_scaling.LossScale object. Received: "
            f"loss_scale={loss_scale!r}."
        )
    return FixedLossScale(_arguments.positive("loss_scale", loss_scale))
