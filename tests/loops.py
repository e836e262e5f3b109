"""Gradients and training loops of the user's own, alike for both backends."""

import keras
from keras import ops

from tests import steps


def gradients(loss, variables, mode="eager"):
    """Returns the gradients of `loss()`, `None` where there is none.

    Args:
        loss: Function that reads the variables.
        variables: Variables of Keras.
        mode: One of `steps.MODES`, how they are computed.
    """
    if keras.backend.backend() == "jax":
        import jax

        def of(values):
            with keras.StatelessScope(zip(variables, values, strict=True)):
                return loss()

        values = [variable.value for variable in variables]
        return steps.compiled(jax.grad(of), mode)(values)
    import tensorflow as tf

    def taken():
        with tf.GradientTape() as tape:
            value = loss()
        found = tape.gradient(value, [v.value for v in variables])
        return [g if g is None else tf.convert_to_tensor(g) for g in found]

    return steps.compiled(taken, mode)()


def squared_error(y, found):
    return ops.mean(ops.square(found - y))


class Loop:
    """Trains a model without `fit`.

    Args:
        model: The model.
        optimizer: Any optimizer, which need not be the model's.
        mode: One of `steps.MODES`, how a step runs.
        loss: Function of targets and results.
    """

    def __init__(self, model, optimizer, mode, loss=squared_error):
        self.model, self.optimizer, self.loss = model, optimizer, loss
        optimizer.build(model.trainable_variables)
        if keras.backend.backend() == "jax":
            self.step = self._held(steps.compiled(self.by_jax, mode))
        else:
            self.step = steps.compiled(self.by_tensorflow, mode)

    def by_tensorflow(self, x, y):
        import tensorflow as tf

        weights = self.model.trainable_variables
        with tf.GradientTape() as tape:
            loss = self.loss(y, self.model(x, training=True))
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return loss

    def by_jax(self, weights, others, slots, x, y):
        import jax

        def loss_of(weights):
            found, after = self.model.stateless_call(
                weights, others, x, training=True
            )
            return self.loss(y, found), after

        gradient = jax.value_and_grad(loss_of, has_aux=True)
        (loss, others), slopes = gradient(weights)
        weights, slots = self.optimizer.stateless_apply(slots, slopes, weights)
        return loss, (weights, others, slots)

    def groups(self):
        """Lists the variables that a step of JAX takes and returns."""
        return (
            self.model.trainable_variables,
            self.model.non_trainable_variables,
            self.optimizer.variables,
        )

    def _held(self, step):
        """Returns a step that reads and assigns the variables itself."""

        def held(x, y):
            groups = self.groups()
            values = ([v.value for v in group] for group in groups)
            loss, after = step(*values, x, y)
            for group, new in zip(groups, after, strict=True):
                for variable, value in zip(group, new, strict=True):
                    variable.assign(value)
            return loss

        return held
