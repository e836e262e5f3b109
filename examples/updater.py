"""One training step of one's own under TensorFlow and JAX, and its updater.

The recipe that uses it is `training_loop.py`.
"""

from collections.abc import Callable
from typing import Any

import keras

import tfmix


class Updater:
    """Everything between a batch and the next weights, in one object.

    Accumulation, weight decay and clipping are the inner optimizer's, which
    gets true gradients, summed over all replicas; `LossScaleOptimizer` sums,
    unscales and checks them; what is left is to try a batch again.

    Args:
        model: A Keras model, built.
        optimizer: A `tfmix.LossScaleOptimizer`.
        loss: A Keras loss.
        retries: How often a batch that overflowed is tried again, each time
            at half the scale. Defaults to `0`: it is dropped.
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer: tfmix.LossScaleOptimizer,
        loss: Any,
        retries: int = 0,
    ) -> None:
        self.model, self.optimizer, self.retries = model, optimizer, retries
        optimizer.build(model.trainable_variables)
        under_jax = keras.backend.backend() == "jax"
        make = jax_step if under_jax else tensorflow_step
        self.step = make(model, optimizer, loss)

    def update(self, x: Any, y: Any) -> tuple[float, bool]:
        """Takes a step; returns the loss and whether it was applied."""
        for _ in range(1 + self.retries):
            loss, applied = self.step(x, y)
            if applied:
                break
        return float(loss), bool(applied)


def tensorflow_step(model: Any, optimizer: Any, loss: Any) -> Callable:
    """Compiles a step; in the scope of a strategy, one on all replicas.

    Args:
        model: A Keras model, built.
        optimizer: A `tfmix.LossScaleOptimizer`, built.
        loss: A Keras loss. Under a strategy Keras divides it by the number
            of replicas, so that their gradients add up to the mean.

    Returns:
        A function of a batch that returns the loss and whether the step was
        applied.
    """
    import tensorflow as tf

    strategy = tf.distribute.get_strategy()

    @tf.function
    def on_replica(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
            scaled = optimizer.scale_loss(value)
        grads = tape.gradient(scaled, model.trainable_variables)
        return value, optimizer.apply(grads, model.trainable_variables)

    def shares(values: Any) -> Any:
        return strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(
                values[
                    context.replica_id_in_sync_group :: (
                        context.num_replicas_in_sync
                    )
                ]
            )
        )

    def step(x: Any, y: Any) -> Any:
        value, applied = strategy.run(on_replica, (shares(x), shares(y)))
        total = sum(map(float, strategy.experimental_local_results(value)))
        # All replicas step or none does: the first one's word is enough.
        return total, strategy.experimental_local_results(applied)[0]

    return step


def jax_step(model: Any, optimizer: Any, loss: Any) -> Callable:
    """Compiles a step; under a `keras.distribution`, one on all devices.

    Args:
        model: A Keras model, built.
        optimizer: A `tfmix.LossScaleOptimizer`, built.
        loss: A Keras loss.

    Returns:
        A function of a batch that returns the loss and whether the step was
        applied.
    """
    import jax

    state = (
        model.trainable_variables,
        model.non_trainable_variables,
        optimizer.variables,
    )

    @jax.jit
    def compiled(values: Any, x: Any, y: Any) -> Any:
        trainable, fixed, scaling = values
        mapping = list(zip(optimizer.variables, scaling, strict=True))

        def scaled_loss(trainable: Any) -> Any:
            outputs, after = model.stateless_call(
                trainable, fixed, x, training=True
            )
            value = loss(y, outputs)
            with keras.StatelessScope(mapping):
                return optimizer.scale_loss(value), (value, after)

        grads, (value, fixed) = jax.grad(scaled_loss, has_aux=True)(trainable)
        trainable, scaling = optimizer.stateless_apply(
            scaling, grads, trainable
        )
        return value, (trainable, fixed, scaling)

    def step(x: Any, y: Any) -> Any:
        values = [[one.value for one in variables] for variables in state]
        value, after = compiled(values, shared(x), shared(y))
        for variables, new in zip(state, after, strict=True):
            for variable, number in zip(variables, new, strict=True):
                variable.assign(number)
        return value, optimizer.last_step_applied()

    return step


def shared(values: Any) -> Any:
    """Lays a batch out over the devices of the distribution (JAX)."""
    distribution = keras.distribution.distribution()
    if distribution is None:
        return values
    layout = distribution.get_data_layout(values.shape)
    return keras.distribution.distribute_tensor(values, layout)
