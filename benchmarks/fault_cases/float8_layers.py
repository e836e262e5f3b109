"""Faults of matrix products in float8: Keras's layers, and tfmix's policy."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from benchmarks.fault_cases import words
from benchmarks.fault_cases.record import Outcome, fault

_STEPS = 60
_WIDTH = 32
# A loss may be this many times that of float32, because float8 has two or
# three bits of mantissa.
_NEAR = 1.25


def _model(trainable: bool = True, twice: bool = False) -> Any:
    """Returns two Dense layers in front of a float32 one."""
    keras.utils.set_random_seed(3)
    dense = functools.partial(keras.layers.Dense, _WIDTH, activation="tanh")
    first = dense(name="first", trainable=trainable)
    inputs = keras.Input((_WIDTH,))
    hidden = first(inputs)
    hidden = first(hidden) if twice else dense(name="second")(hidden)
    head = keras.layers.Dense(_WIDTH, dtype="float32", name="head")
    return keras.Model(inputs, head(hidden))


def _data() -> tuple[Any, Any]:
    x = np.random.default_rng(4).normal(size=(64, _WIDTH)).astype("float32")
    return x, 0.5 * np.roll(x, 1, axis=-1)


def _train(model: Any, optimizer: Any, loss_weight: float = 1.0) -> float:
    """Trains on one batch; returns the last loss."""
    model.compile(optimizer, loss="mse", loss_weights=[loss_weight])
    x, y = _data()
    for _ in range(_STEPS):
        model.train_on_batch(x, y)
    return float(np.mean((model.predict(x, verbose=0) - y) ** 2))


def _adam() -> Any:
    # With such a small epsilon, the size of gradients does not matter.
    return keras.optimizers.Adam(0.01, epsilon=1e-30)


def _compared(
    system: Any,
    make: Callable[[], Any] = _model,
    loss_weight: float = 1.0,
    change: Callable[[Any], Any] = lambda model: model,
) -> Outcome:
    """Trains in float32 and in float8."""
    expected = _train(change(make()), _adam(), loss_weight)
    optimizer = system.wrap(_adam())
    loss = _train(change(system.float8(make)), optimizer, loss_weight)
    return Outcome(
        bool(loss < _NEAR * expected),
        f"loss {loss:.3g} (float32: {expected:.3g}), "
        f"{words.progress(optimizer, _STEPS)}",
    )


@fault()
def float8_layer_used_twice(system: Any) -> Outcome:
    """A float8 layer is called twice."""
    return _compared(system, lambda: _model(twice=True))


@fault()
def float8_layer_frozen(system: Any) -> Outcome:
    """A frozen float8 layer, whose inputs are as large as 4000."""

    def outputs(model: Any) -> Any:
        _train(model, system.wrap(_adam()))
        front = keras.Model(model.input, model.get_layer("first").output)
        return front.predict(1000 * _data()[0], verbose=0)

    def make() -> Any:
        model = _model(trainable=False)
        model.get_layer("first").activation = keras.activations.linear
        return model

    right, found = outputs(make()), outputs(system.float8(make))
    error = np.linalg.norm(found - right) / np.linalg.norm(right)
    return Outcome(
        bool(error < 0.1), f"its outputs are off by {100 * error:.0f} %"
    )


@fault()
def float8_small_gradients(system: Any) -> Outcome:
    """float8 layers, a scaled loss, and gradients of 1e-6."""
    return _compared(system, loss_weight=1e-5)


@fault()
def float8_ema(system: Any) -> Outcome:
    """float8 layers, `use_ema=True` and `ema_overwrite_frequency=5`."""
    optimizer = keras.optimizers.Adam(
        0.01, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=5
    )
    loss = _train(system.float8(_model), system.wrap(optimizer))
    return Outcome(bool(loss < 0.2), f"loss {loss:.3g}")


@fault()
def float8_lora(system: Any) -> Outcome:
    """`enable_lora` on float8 layers."""

    def lora(model: Any) -> Any:
        model.get_layer("first").enable_lora(4)
        return model

    return _compared(system, change=lora)
