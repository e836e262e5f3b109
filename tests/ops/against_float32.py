"""How far a layer's results and gradients are from float32's."""

import keras
import numpy as np
from keras import layers, ops

import tfmix
from tests import helpers, steps

NO_FLOATS = "no floats"
# bfloat16 has an eighth of float16's digits.
WITHIN = {"mixed_float16": 0.03, "mixed_bfloat16": 0.1}


class Calls(layers.Layer):
    """Computes a function of its input and its weight."""

    def __init__(self, function, weight, **kwargs):
        super().__init__(**kwargs)
        self.function = function
        self.w = self.add_weight(shape=weight.shape, initializer="zeros")
        self.w.assign(weight)
        self.built = True

    def call(self, x):
        return self.function(x, self.w)


def results(policy, function, x, weight, mode="eager"):
    """Returns a result, and the gradients of the weight and of the input."""
    tfmix.set_global_policy(policy)
    layer = Calls(function, weight)
    x = ops.convert_to_tensor(x)
    if helpers.ON_JAX:
        found = _by_jax(layer, x, mode)
    else:
        found = _by_tensorflow(layer, x, mode)
    return [helpers.to_numpy(t) for t in found]


def _by_jax(layer, x, mode):
    import jax

    def loss(weight, x):
        with keras.StatelessScope([(layer.w, weight)]):
            return _loss(layer(x))

    gradient = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    (_, y), gradients = steps.compiled(gradient, mode)(layer.w.value, x)
    return y, *gradients


def _by_tensorflow(layer, x, mode):
    import tensorflow as tf

    def compute(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss, y = _loss(layer(x))
        sources = [layer.w.value, x]
        zero = tf.UnconnectedGradients.ZERO
        gradients = tape.gradient(loss, sources, unconnected_gradients=zero)
        return y, *map(tf.convert_to_tensor, gradients)

    return steps.compiled(compute, mode)(x)


def _loss(y):
    parts = [t for t in keras.tree.flatten(y) if is_float(t)]
    wide = [ops.reshape(ops.cast(t, "float32"), (-1,)) for t in parts]
    if not wide:
        raise TypeError(NO_FLOATS)
    y = ops.concatenate(wide)
    if (y.shape[0] or 0) > 1000:
        return ops.sum(y), y
    signs = ops.cos(ops.arange(ops.shape(y)[0], dtype="float32"))
    return ops.sum(y * signs), y


def is_float(value):
    dtype = getattr(value, "dtype", None)
    return dtype is not None and keras.backend.is_float_dtype(
        keras.backend.standardize_dtype(dtype)
    )


def error(found, right):
    """Returns the largest error, as a part of the largest number."""
    assert found.shape == right.shape
    known = np.isfinite(right)
    # Others are beyond float16.
    if not known.any() or np.abs(right[known]).max() > 6e4:
        return 0.0
    found, right = found[known], right[known]
    if not np.isfinite(found).all():
        return np.inf
    return np.abs(found - right).max() / max(np.abs(right).max(), 1e-6)


def check(function, x, weight, policy="mixed_float16", mode="eager"):
    """Fails where a result or a gradient is not float32's."""
    right = results("float32", function, x, weight)
    found = results(policy, function, x, weight, mode)
    pairs = zip(found, right, strict=True)
    errors = [error(one, other) for one, other in pairs]
    assert max(errors) < WITHIN[policy], errors
