"""Faults that need two replicas in one process (`tf.distribute`)."""

import functools
from typing import Any

import keras
import numpy as np

from benchmarks.fault_cases import words
from benchmarks.fault_cases.record import TENSORFLOW_ONLY, Outcome, fault

_SEEDS = 6


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


def _mirrored_vector(system: Any, inner: Any) -> tuple[Any, Any, Any]:
    strategy = mirrored()
    with strategy.scope():
        variable = system.variable([1.0, 2.0], "weight")
        optimizer = system.wrap(inner(), initial_scale=1024.0)
        optimizer.build([variable])
    return strategy, variable, optimizer


@fault(TENSORFLOW_ONLY)
def inf_in_one_replica(system: Any) -> Outcome:
    """An infinite gradient on replica 1 of 2."""
    strategy, variable, optimizer = _mirrored_vector(
        system, lambda: keras.optimizers.SGD(0.1)
    )
    rows = [[1.0, 1.0], [np.inf, 1.0]]
    step_on_replicas(strategy, optimizer, variable, np.float32(rows))
    right = words.close(variable, [1.0, 2.0])
    return Outcome(
        right and words.scale(optimizer) == 512.0,
        f"weight {words.vector(variable)}, {words.progress(optimizer, 1)} "
        "(right: 512)",
    )


def _heavy_tailed(seed: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(512, 8)).astype("float32")
    noise = generator.standard_t(1.5, size=(512, 1))
    return x, (x[:, :1] * 3 + noise).astype("float32")


def _fit_heavy_tailed(system: Any, seed: int) -> Any:
    keras.utils.set_random_seed(seed)
    policy = {"dtype": system.policy}
    with mirrored().scope():
        model = keras.Sequential(
            [
                keras.Input((8,), dtype="float32"),
                keras.layers.Dense(32, activation="relu", **policy),
                keras.layers.Dense(1, **policy),
            ]
        )
        model.compile(system.wrap(keras.optimizers.Adam(1e-3)), loss="mse")
    model.fit(*_heavy_tailed(seed), batch_size=64, epochs=1, verbose=0)
    return model


@fault(TENSORFLOW_ONLY)
def start_up_overflow(system: Any) -> Outcome:
    """Heavy-tailed regression on 2 replicas, default scaler, six seeds."""
    alive, scales = 0, []
    for seed in range(_SEEDS):
        model = _fit_heavy_tailed(system, seed)
        alive += words.finite(model.trainable_variables)
        scales.append(words.scale(model.optimizer))
    return Outcome(
        alive == _SEEDS,
        f"{_SEEDS - alive} of {_SEEDS} runs end with NaN weights, scales "
        f"{min(scales):g} to {max(scales):g}",
    )


@fault(TENSORFLOW_ONLY)
def replicas_global_clipnorm(system: Any) -> Outcome:
    """`global_clipnorm=1` on 2 replicas with gradients of norm 100."""
    strategy, variable, optimizer = _mirrored_vector(
        system, lambda: keras.optimizers.SGD(1.0, global_clipnorm=1.0)
    )
    before = words.to_numpy(variable)
    rows = np.float32([[60.0, 80.0], [60.0, 80.0]])
    step_on_replicas(strategy, optimizer, variable, rows)
    norm = float(np.linalg.norm(before - words.to_numpy(variable)))
    return Outcome(
        words.close(variable, [0.4, 1.2]),
        f"the update has norm {norm:.3g} (right: 1)",
    )


@fault(TENSORFLOW_ONLY)
def replicas_accumulation(system: Any) -> Outcome:
    """`gradient_accumulation_steps=2` on 2 replicas, one bad micro-step."""
    strategy, variable, optimizer = _mirrored_vector(
        system,
        lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
    )
    for bad in (1.0, np.inf, 1.0):
        rows = np.float32([[1.0, 1.0], [bad, 1.0]])
        step_on_replicas(strategy, optimizer, variable, rows)
    right = words.close(variable, [0.8, 1.8])
    return Outcome(right, f"weight {words.vector(variable)} (right: [0.8 1.8])")


@fault(TENSORFLOW_ONLY)
def replicas_ema(system: Any) -> Outcome:
    """`ema_overwrite_frequency=2` on 2 replicas, one bad step."""
    strategy, variable, optimizer = _mirrored_vector(
        system,
        lambda: keras.optimizers.SGD(
            0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2
        ),
    )
    for bad in (1.0, np.inf, 1.0):
        rows = np.float32([[1.0, 1.0], [bad, 1.0]])
        step_on_replicas(strategy, optimizer, variable, rows)
    single = keras.Variable(np.float32([1.0, 2.0]))
    oracle = keras.optimizers.SGD(
        0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2
    )
    for _ in range(2):
        oracle.apply([keras.ops.convert_to_tensor([2.0, 2.0])], [single])
    right = words.close(variable, words.to_numpy(single))
    return Outcome(
        right,
        f"weight {words.vector(variable)} (one device: {words.vector(single)})",
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
