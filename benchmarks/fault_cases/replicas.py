"""Faults that need two replicas in one process (`tf.distribute`)."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from benchmarks.fault_cases import words
from benchmarks.fault_cases.record import TENSORFLOW_ONLY, Fault, Outcome, fault

_SEEDS = 6
_SCALE = 1024.0


@functools.cache
def mirrored() -> Any:
    """Returns the process's strategy over its first two CPU devices.

    All faults share it: TensorFlow numbers the collectives of each strategy
    from 100, so two strategies on the same devices would mix up theirs.
    """
    import tensorflow as tf

    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def step_on_replicas(
    strategy: Any, optimizer: Any, variable: Any, gradients: Any
) -> None:
    """Runs one compiled step with an unscaled gradient for each replica."""
    import tensorflow as tf

    def replica_step() -> None:
        context = tf.distribute.get_replica_context()
        own = tf.constant(gradients)[context.replica_id_in_sync_group]
        optimizer.apply([optimizer.scale_loss(own)], [variable])

    tf.function(lambda: strategy.run(replica_step))()


def _steps(
    name: str,
    title: str,
    inner: Callable[[], Any],
    steps: list[list[list[float]]],
    right: list[float],
) -> Fault:
    """A few steps from the weight [1, 2].

    Args:
        name: The fault's name.
        title: Its title.
        inner: Function that creates the optimizer.
        steps: For each step, the gradients of both replicas.
        right: The right weight after the steps.
    """
    halved = sum(not np.isfinite(step).all() for step in steps)

    def provoke(system: Any) -> Outcome:
        with mirrored().scope():
            variable = system.variable([1.0, 2.0], "weight")
            optimizer = system.wrap(inner(), initial_scale=_SCALE)
            optimizer.build([variable])
        for step in np.float32(steps):
            step_on_replicas(mirrored(), optimizer, variable, step)
        scale, expected = words.scale(optimizer), _SCALE / 2**halved
        said = f"scale {scale:g} (right: {expected:g})"
        return words.weight_is(variable, right, said, scale == expected)

    return Fault(name, title, provoke, TENSORFLOW_ONLY)


def _sgd(rate: float = 0.1, **settings: Any) -> Callable[[], Any]:
    return functools.partial(keras.optimizers.SGD, rate, **settings)


_GOOD, _BAD = [[1.0, 1.0], [1.0, 1.0]], [[1.0, 1.0], [np.inf, 1.0]]
INFINITY = _steps(
    "inf-in-one-replica",
    "An infinite gradient on replica 1 of 2",
    _sgd(),
    [_BAD],
    [1.0, 2.0],
)
CLIPNORM = _steps(
    "replicas-global-clipnorm",
    "`global_clipnorm=1` on 2 replicas with gradients of norm 100",
    _sgd(1.0, global_clipnorm=1.0),
    [[[60.0, 80.0], [60.0, 80.0]]],
    [0.4, 1.2],
)
ACCUMULATION = _steps(
    "replicas-accumulation",
    "`gradient_accumulation_steps=2` on 2 replicas, one bad micro-step",
    _sgd(gradient_accumulation_steps=2),
    [_GOOD, _BAD, _GOOD],
    [0.8, 1.8],
)
# After each of two steps the average is half the old one and half the weight,
# and overwrites the weight after the second.
EMA = _steps(
    "replicas-ema",
    "`ema_overwrite_frequency=2` on 2 replicas, one bad step",
    _sgd(use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
    [_GOOD, _BAD, _GOOD],
    [0.7, 1.7],
)


@fault(TENSORFLOW_ONLY)
def start_up_overflow(system: Any) -> Outcome:
    """Heavy-tailed regression on 2 replicas, default scaler, six seeds."""
    alive, scales = 0, []
    for seed in range(_SEEDS):
        keras.utils.set_random_seed(seed)
        with mirrored().scope():
            model = keras.Sequential(
                [
                    keras.Input((8,), dtype="float32"),
                    keras.layers.Dense(32, "relu", dtype=system.policy),
                    keras.layers.Dense(1, dtype=system.policy),
                ]
            )
            model.compile(system.wrap(keras.optimizers.Adam(1e-3)), loss="mse")
        generator = np.random.default_rng(seed)
        x = generator.normal(size=(512, 8)).astype("float32")
        y = x[:, :1] * 3 + generator.standard_t(1.5, size=(512, 1))
        model.fit(x, y.astype("float32"), batch_size=64, verbose=0)
        alive += words.finite(model.trainable_variables)
        scales.append(words.scale(model.optimizer))
    return Outcome(
        alive == _SEEDS,
        f"{_SEEDS - alive} of {_SEEDS} runs end with NaN weights, scales "
        f"{min(scales):g} to {max(scales):g}",
    )


def _float8_loss(system: Any, strategy: Any) -> float:
    """Trains two float8 layers; returns the last loss."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [keras.layers.Dense(16, "relu"), keras.layers.Dense(16)]
        model = keras.Sequential([keras.Input((16,)), *layers])
        for layer in layers:
            layer.quantize("float8")
        model.compile(system.wrap(keras.optimizers.SGD(0.05)), loss="mse")
    x = np.random.default_rng(0).normal(size=(16, 16)).astype("float32")
    # In each of the 20 steps, a replica has the same data as one device.
    y = np.tanh(np.tile(x, (40, 1)))
    model.fit(np.tile(x, (40, 1)), y, batch_size=32, shuffle=False, verbose=0)
    return float(model.evaluate(x, y[:16], batch_size=16, verbose=0))


@fault(TENSORFLOW_ONLY)
def replicas_float8(system: Any) -> Outcome:
    """Keras's float8 layers on 2 replicas."""
    import tensorflow as tf

    expected = _float8_loss(system, tf.distribute.get_strategy())
    loss = _float8_loss(system, mirrored())
    return Outcome(
        abs(loss - expected) < 0.02 * expected,
        f"loss {loss:.3g} after 20 steps (one device: {expected:.3g})",
    )
