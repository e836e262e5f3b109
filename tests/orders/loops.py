"""Custom training loops in TensorFlow and in JAX."""

import keras

from tests.orders.models import small_data


def tensorflow_loop(machine, scales=True):
    """A loop that unscales gradients to log them, then applies scaled ones.

    Without `scales`, the loop ignores the loss scale.
    """
    import tensorflow as tf

    model, replicas = machine.model, machine.order.replicas
    optimizer = model.optimizer

    def step(x, y):
        with tf.GradientTape() as tape:
            got = tf.cast(model(x, training=True), "float32")
            loss = tf.reduce_mean((got - y) ** 2) / replicas
            if scales:
                loss = optimizer.scale_loss(loss)
        variables = model.trainable_variables
        grads = tape.gradient(loss, variables)
        if scales:
            optimizer.unscale_gradients(grads)
        optimizer.apply(grads, variables)

    data = small_data()
    if machine.order.mode != "eager":
        step = tf.function(step, jit_compile=machine.order.mode == "xla")
    if machine.strategy is None:
        step(data.x, data.y)
    else:
        machine.strategy.run(step, args=(data.x, data.y))


def jax_loop(machine, scales=True):
    """The same loop with Keras's stateless functions."""
    import jax

    model, optimizer = machine.model, machine.model.optimizer
    x, y = small_data().x, small_data().y
    wrap = jax.jit if machine.order.mode != "eager" else lambda f: f

    def scaled_loss(trainable, rest, state):
        got, rest = model.stateless_call(trainable, rest, x, training=True)
        loss = jax.numpy.mean((got.astype("float32") - y) ** 2)
        if not scales:
            return loss, rest
        mapping = zip(optimizer.variables, state, strict=True)
        with keras.StatelessScope(state_mapping=mapping):
            return optimizer.scale_loss(loss), rest

    groups = (
        model.trainable_variables,
        model.non_trainable_variables,
        optimizer.variables,
    )
    trainable, rest, state = [[v.value for v in group] for group in groups]
    grads, rest = wrap(jax.grad(scaled_loss, has_aux=True))(
        trainable, rest, state
    )

    def unscaled(grads, state):
        mapping = zip(optimizer.variables, state, strict=True)
        with keras.StatelessScope(state_mapping=mapping):
            return optimizer.unscale_gradients(grads)

    if scales:
        wrap(unscaled)(grads, state)
    trainable, state = wrap(optimizer.stateless_apply)(state, grads, trainable)
    for group, values in zip(groups, (trainable, rest, state), strict=True):
        for variable, value in zip(group, values, strict=True):
            variable.assign(value)
