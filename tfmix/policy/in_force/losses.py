"""Losses, metrics and penalties in float32: switched on, off, and carried."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras

from tfmix.policy import op_rules
from tfmix.policy.in_force import ops as ops_in_force
from tfmix.policy.in_force import penalties, switchboard

# Every method in which a model computes outputs, losses or metrics. A train
# step holds its gradient too, so that rematerialised layers are traced under
# the rules they were first run under.
_STEPS = ("call", "train_step", "test_step", "compute_loss", "compute_metrics")

_board = switchboard.Switchboard("tfmix_losses", penalties.replace)


def install() -> None:
    """Puts float32 losses, metrics and penalties in force for the process.

    While they are: loss functions, `keras.losses` and `keras.metrics` widen
    16-bit predictions, activity regularizers and `add_loss` work beside a
    compiled loss, and a model whose output is 16 bit is reported once.
    Twice is as once.
    """
    _board.install(penalties.NAMES)


def uninstall() -> None:
    """Ends what `install` began: every attribute is Keras's own again."""
    _board.install(())


@contextlib.contextmanager
def in_force(active: bool = True) -> Iterator[None]:
    """Computes losses and metrics of a block in float32, or as Keras does.

    Args:
        active: Whether the block has them in float32. Defaults to `True`.

    Example:
        >>> import numpy as np
        >>> predictions = np.array([300.0], "float16")
        >>> with in_force():
        ...     float(keras.losses.mean_squared_error([0.0], predictions))
        90000.0
    """
    with _board.block(penalties.NAMES if active else ()):
        yield


def attach(
    model: keras.Model, float32_ops: Iterable[str]
) -> Callable[[], None]:
    """Lets one model carry its op rules and float32 losses with it.

    For a model that is run while another policy is in force: one that was
    built in a `policy_scope`, or converted. Functions Keras traced before are
    the caller's to drop.

    Args:
        model: A `keras.Model`; nested ones need no call of their own.
        float32_ops: Ops to run in float32, as in `ops.install`.

    Returns:
        A function of no arguments that takes everything back. Methods that
        someone replaced on top since then are left alone.

    Raises:
        TypeError, ValueError: As `ops.resolve`.
    """
    names = op_rules.resolve(float32_ops)
    earlier = {step: vars(model).get(step) for step in _STEPS}
    ours = {step: _under_rules(getattr(model, step), names) for step in _STEPS}
    for step, method in ours.items():
        _set(model, step, method)

    def detach() -> None:
        for step, method in ours.items():
            if vars(model).get(step) is method:
                _set(model, step, earlier[step])

    return detach


def _under_rules(method: Callable, names: tuple[str, ...]) -> Callable:
    @functools.wraps(method)
    def under_rules(*args: Any, **kwargs: Any) -> Any:
        with ops_in_force.in_force(names), in_force():
            return method(*args, **kwargs)

    return under_rules


def _set(model: keras.Model, name: str, method: Callable | None) -> None:
    # Past the trackers of `Layer.__setattr__`: a method is no state.
    if method is None:
        object.__delattr__(model, name)
    else:
        object.__setattr__(model, name, method)
