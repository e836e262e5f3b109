"""Faults of an existing float32 model that goes into 16 bit and back."""

from typing import Any

import keras
import numpy as np

from benchmarks.fault_cases import replicas, words
from benchmarks.fault_cases.record import TENSORFLOW_ONLY, Outcome, fault

_STEPS = 8


def data() -> tuple[np.ndarray, np.ndarray]:
    """Returns 16 rows, whose second half equals the first.

    So each of two replicas has the same data as one device.
    """
    generator = np.random.default_rng(11)
    x = generator.normal(size=(8, 4)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    return np.tile(x, (2, 1)), np.tile(y, (2, 1))


def model_of(optimizer: Any, **settings: Any) -> Any:
    """Returns a compiled float32 model with known weights."""
    keras.utils.set_random_seed(6)
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(8, activation="tanh", name="hidden"),
            keras.layers.Dense(1, name="head"),
        ]
    )
    model.compile(optimizer, loss="mse", **settings)
    return model


def train(model: Any) -> float:
    """Trains some steps on all rows at once; returns their mean loss."""
    x, y = (np.tile(array, (_STEPS, 1)) for array in data())
    history = model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
    return float(history.history["loss"][0])


def float32_loss(optimizer: Any) -> float:
    """Returns the loss after twice as many steps in plain Keras, unsplit."""
    model = model_of(optimizer)
    train(model)
    return train(model)


@fault(TENSORFLOW_ONLY, seconds=120)
def convert_replicas_to_16_bit(system: Any) -> Outcome:
    """A trained model on 2 replicas goes to bfloat16 variables and back."""
    expected = float32_loss(keras.optimizers.SGD(0.05))
    strategy = replicas.mirrored()
    with strategy.scope():
        model = model_of(keras.optimizers.SGD(0.05))
    train(model)
    undo = system.convert(model, "bfloat16")
    kernel = model.get_layer("hidden").kernel
    dtype = kernel.dtype
    loss = train(model)
    values = strategy.experimental_local_results(kernel.value)
    mirrored = len(values) == 2 and words.same(
        [values[0].numpy()], [values[1].numpy()]
    )
    undo()
    back = kernel.dtype == "float32" and np.isfinite(train(model))
    near = abs(loss - expected) < 0.1 * expected
    return Outcome(
        bool(dtype == "bfloat16" and near and mirrored and back),
        f"variables in {dtype}, loss {loss:.3g} (float32: {expected:.3g}), "
        f"replicas {'equal' if mirrored else 'not equal'}",
    )


@fault(seconds=120)
def optimizer_changed_between(system: Any) -> Outcome:
    """Into mixed_float16, another optimizer by compile, and back: 2 orders."""
    orders = ("SGD", "Adam"), ("Adam", "RMSprop")
    names, right = [], True
    for first, second in orders:
        model = model_of(getattr(keras.optimizers, first)(0.01))
        train(model)
        undo = system.convert(model, "mixed_float16")
        given = getattr(keras.optimizers, second)(0.01)
        model.compile(given, loss="mse")
        before = train(model)
        undo()
        after = train(model)
        names.append(type(model.optimizer).__name__)
        dtype = model.get_layer("hidden").compute_dtype
        right &= after < before and dtype == "float32"
        right &= names[-1] == second
    return Outcome(
        right,
        f"trains on in {dtype}, with {', '.join(names)} (given: "
        f"{', '.join(second for _, second in orders)})",
    )


FAULTS = (convert_replicas_to_16_bit, optimizer_changed_between)
