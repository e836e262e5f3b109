"""Faults of loops that compute gradients like Keras's guides, in 16 bit.

The loops do not call `scale_loss`, and do not wrap an optimizer.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from benchmarks.fault_cases import words
from benchmarks.fault_cases.record import Outcome, fault

_POLICY = "mixed_float16"
# A function of a model and the values of its weights (JAX), or `None`.
Loss = Callable[[Any, Any], Any]


@fault()
def unscaled_mean_of_pixels(system: Any) -> Outcome:
    """A loop's loss is a mean over 98,304 pixels, and not scaled."""
    random = np.random.default_rng(0)
    pixels = random.uniform(size=(8, 12288)).astype("float32")

    def make() -> Any:
        layers = keras.layers
        return keras.Sequential(
            [
                keras.Input((12288,)),
                layers.Dense(32, activation="relu"),
                layers.Dense(12288, activation="sigmoid"),
            ]
        )

    def loss(model: Any, values: Any) -> Any:
        return ops.mean(ops.square(_called(model, values, pixels) - pixels))

    return _as_in_float32(system, make, loss)


@fault()
def unscaled_rows_of_an_embedding(system: Any) -> Outcome:
    """A language model's loss is a mean over 8,192 tokens, and not scaled."""
    tokens = np.random.default_rng(0).integers(0, 500, (64, 128))

    def make() -> Any:
        layers = keras.layers
        return keras.Sequential(
            [
                keras.Input((128,), dtype="int32"),
                layers.Embedding(500, 16),
                layers.Dense(500),
            ]
        )

    def loss(model: Any, values: Any) -> Any:
        outputs = _called(model, values, tokens)
        return ops.mean(
            keras.losses.sparse_categorical_crossentropy(
                tokens, outputs, from_logits=True
            )
        )

    return _as_in_float32(system, make, loss)


@fault()
def penalty_on_a_gradient_of_weights(system: Any) -> Outcome:
    """A loss with the squares of its own gradient, by two tapes."""
    random = np.random.default_rng(0)
    x = random.normal(size=(32, 8)).astype("float32")

    def make() -> Any:
        layers = keras.layers
        return keras.Sequential(
            [
                keras.Input((8,)),
                layers.Dense(16, activation="tanh"),
                layers.Dense(1),
            ]
        )

    def loss(model: Any, values: Any) -> Any:
        def inner(model: Any, values: Any) -> Any:
            return 1e-3 * ops.mean(_called(model, values, x) ** 2)

        slopes = _gradients(model, inner, values)
        return sum(ops.sum(ops.square(slope)) for slope in slopes)

    return _as_in_float32(system, make, loss)


@fault()
def targets_of_50_000(system: Any) -> Outcome:
    """A regression with raw targets of 5e4, by `fit`."""
    losses = {
        policy: _regression(system, policy) for policy in ("float32", _POLICY)
    }
    expected, found = losses["float32"], losses[_POLICY]
    return Outcome(
        abs(found - expected) < 0.01 * expected,
        f"ends at a loss of {found:.4g} (float32: {expected:.4g})",
    )


def _regression(system: Any, policy: str) -> float:
    random = np.random.default_rng(0)
    x = random.normal(size=(256, 8)).astype("float32")
    y = 5e4 * (1.0 + 0.1 * x.sum(1, keepdims=True))
    system.set_policy(policy)
    try:
        keras.utils.set_random_seed(1)
        layers = keras.layers
        model = keras.Sequential(
            [
                keras.Input((8,)),
                layers.Dense(64, activation="relu"),
                layers.Dense(1, dtype="float32"),
            ]
        )
        model.compile(keras.optimizers.Adam(0.1), "mse")
        losses = model.fit(x, y, epochs=8, batch_size=32, verbose=0)
    finally:
        system.set_policy("float32")
    found: float = losses.history["loss"][-1]
    return found


@fault()
def bad_batch_of_two_optimizers(system: Any) -> Outcome:
    """One infinite pixel in a loop with two optimizers of Keras's."""
    system.set_policy(_POLICY)
    try:
        networks = [_network(seed) for seed in (1, 2)]
        adams = [keras.optimizers.Adam(0.01) for _ in networks]
        x = np.ones((4, 4), "float32")
        bad = np.where(np.eye(4), np.inf, x).astype("float32")
        before = [words.to_numpy(v) for n in networks for v in n.weights]
        _steps(networks, adams, bad)
        after = [words.to_numpy(v) for n in networks for v in n.weights]
        _steps(networks, adams, x)
        last = [words.to_numpy(v) for n in networks for v in n.weights]
    finally:
        system.set_policy("float32")
    kept = all(map(np.array_equal, before, after))
    finite = all(np.isfinite(each).all() for each in last)
    moved = not any(map(np.array_equal, after, last))
    return Outcome(
        kept and finite and moved,
        f"the bad batch {'left no trace' if kept else 'changed weights'}, "
        f"the next one {'trains' if finite and moved else 'does not train'}",
    )


def _network(seed: int) -> Any:
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(8, activation="relu"),
            layers.Dense(1),
        ]
    )


def _steps(networks: list[Any], optimizers: list[Any], x: Any) -> None:
    """Runs a step with each network's optimizer."""
    for model, optimizer in zip(networks, optimizers, strict=True):

        def loss(model: Any, values: Any) -> Any:
            return ops.mean(_called(model, values, x) ** 2)

        slopes = _gradients(model, loss)
        optimizer.apply(slopes, model.trainable_variables)


def _as_in_float32(system: Any, make: Callable[[], Any], loss: Loss) -> Outcome:
    """Compares the gradients of one model with those of float32."""
    found = {}
    for policy in ("float32", _POLICY):
        system.set_policy(policy)
        try:
            keras.utils.set_random_seed(3)
            slopes = _gradients(make(), loss)
            found[policy] = [
                np.asarray(ops.convert_to_numpy(slope)) for slope in slopes
            ]
        finally:
            system.set_policy("float32")
    errors = [
        float(np.linalg.norm(got - right) / np.linalg.norm(right))
        for got, right in zip(found[_POLICY], found["float32"], strict=True)
    ]
    return Outcome(
        max(errors) < 0.005,
        f"gradients are off by up to {max(errors):.2g} of their size",
    )


def _called(model: Any, values: Any, x: Any) -> Any:
    """Calls a model with the given weights, or with its own."""
    if values is None:
        return ops.cast(model(x, training=True), "float32")
    frozen = [v.value for v in model.non_trainable_variables]
    outputs, _ = model.stateless_call(values, frozen, x, training=True)
    return ops.cast(outputs, "float32")


def _gradients(model: Any, loss: Loss, values: Any = None) -> list[Any]:
    """Returns the gradients of a loss by the model's weights."""
    weights = model.trainable_variables
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            found = loss(model, None)
        return [
            tf.convert_to_tensor(each)
            for each in tape.gradient(found, weights)
            if each is not None
        ]
    import jax

    if values is None:
        values = [v.value for v in weights]
    slopes: list[Any] = jax.grad(lambda values: loss(model, values))(values)
    return slopes


FAULTS = (
    unscaled_mean_of_pixels,
    unscaled_rows_of_an_embedding,
    penalty_on_a_gradient_of_weights,
    targets_of_50_000,
    bad_batch_of_two_optimizers,
)
