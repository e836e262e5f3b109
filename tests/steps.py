"""One optimizer step, for every mode of execution."""

import keras
import numpy as np
from keras import ops

MODES = {
    "tensorflow": ("eager", "graph", "xla"),
    "jax": ("eager", "jit"),
}[keras.backend.backend()]


def compiled(function, mode):
    """Returns a function of tensors as a mode runs it."""
    if mode == "eager":
        return function
    if keras.backend.backend() == "jax":
        import jax

        return jax.jit(function)
    import tensorflow as tf

    return tf.function(function, jit_compile=mode == "xla", autograph=False)


def variables():
    """Returns two model variables with known values."""
    kernel = np.linspace(-1.0, 1.0, 6, dtype="float32").reshape(3, 2)
    return [
        keras.Variable(kernel, name="kernel"),
        keras.Variable([0.5, -0.5], name="bias"),
    ]


def gradients(seed):
    """Returns unscaled gradients for `variables`, as NumPy arrays."""
    rng = np.random.default_rng(seed)
    return [
        rng.normal(size=shape).astype("float32") for shape in [(3, 2), (2,)]
    ]


def stepper(optimizer, model_variables, mode):
    """Returns a function that takes gradient arrays and applies them."""
    if not optimizer.built:
        optimizer.build(model_variables)
    if keras.backend.backend() == "tensorflow":
        return _tensorflow_stepper(optimizer, model_variables, mode)
    return _jax_stepper(optimizer, model_variables, mode)


def _tensorflow_stepper(optimizer, model_variables, mode):
    import tensorflow as tf

    def step(grads):
        optimizer.apply(list(grads), model_variables)

    if mode != "eager":
        step = tf.function(step, autograph=False, jit_compile=mode == "xla")

    def tensor(gradient):
        is_sparse = isinstance(gradient, tf.IndexedSlices)
        return gradient if is_sparse else tf.constant(gradient)

    return lambda grads: step(tuple(map(tensor, grads)))


def _jax_stepper(optimizer, model_variables, mode):
    import jax

    if mode == "eager":
        return lambda grads: optimizer.apply(
            [ops.convert_to_tensor(g) for g in grads], model_variables
        )
    compiled = jax.jit(optimizer.stateless_apply)

    def step(grads):
        new_model, new_optimizer = compiled(
            [v.value for v in optimizer.variables],
            list(grads),
            [v.value for v in model_variables],
        )
        for variable, value in zip(model_variables, new_model, strict=True):
            variable.assign(value)
        pairs = zip(optimizer.variables, new_optimizer, strict=True)
        for variable, value in pairs:
            variable.assign(value)

    return step


def settings(mode):
    """Returns the arguments of `compile` with which a model runs in a mode."""
    return {
        "run_eagerly": mode == "eager",
        "jit_compile": mode in ("xla", "jit"),
    }
