"""Shared by the tests of the 16-bit optimizers."""

import keras
import numpy as np
from keras import ops

from tfmix.optimizers import bfloat16_optimizer, master_weights

# Most sizes leave SIMD registers partly filled; one fills them.
SHAPES = [(7, 5), (5,), (33, 17), (16, 3)]

# Every way to keep the bits that bfloat16 lacks.
WAYS = {
    "masters": master_weights.MasterWeightOptimizer,
    "flat": lambda inner: master_weights.MasterWeightOptimizer(
        inner, flat=True
    ),
    "split": lambda inner: master_weights.MasterWeightOptimizer(
        inner, split=True
    ),
    "stochastic": lambda inner: bfloat16_optimizer.BFloat16Optimizer(
        inner, seed=7
    ),
    "narrow": lambda inner: bfloat16_optimizer.BFloat16Optimizer(
        inner, seed=7, slot_dtype="bfloat16"
    ),
}
EXACT_WAYS = ["masters", "flat", "split"]


def variables(dtype, seed=0, shapes=SHAPES):
    """Returns variables with the same bfloat16 numbers in any dtype."""
    random = np.random.default_rng(seed)
    return [
        keras.Variable(
            ops.cast(ops.cast(random.normal(size=shape), "bfloat16"), dtype),
            name=f"v{i}",
        )
        for i, shape in enumerate(shapes)
    ]


def gradients(steps, seed=1, shapes=SHAPES):
    """Returns float32 gradients for `variables`, a list per step."""
    random = np.random.default_rng(seed)
    return [
        [random.normal(size=shape).astype("float32") for shape in shapes]
        for _ in range(steps)
    ]


def run(optimizer, model_variables, steps, jit=False):
    """Applies gradients in a compiled function, as `fit` does."""
    if not optimizer.built:
        optimizer.build(model_variables)
    if keras.backend.backend() == "tensorflow":
        _run_tensorflow(optimizer, model_variables, steps, jit)
    else:
        _run_jax(optimizer, model_variables, steps)


def _run_tensorflow(optimizer, model_variables, steps, jit):
    import tensorflow as tf

    @tf.function(jit_compile=jit)
    def step(*grads):
        optimizer.apply(list(grads), model_variables)

    for grads in steps:
        step(*[tf.convert_to_tensor(grad) for grad in grads])


def _run_jax(optimizer, model_variables, steps):
    import jax

    step = jax.jit(optimizer.stateless_apply)
    state = [v.value for v in optimizer.variables]
    values = [v.value for v in model_variables]
    for grads in steps:
        values, state = step(state, grads, values)
    everything = list(model_variables) + optimizer.variables
    for variable, value in zip(everything, values + state, strict=True):
        variable.assign(value)


def bits_of(values):
    """Returns the exact content of variables or tensors, to compare by `==`."""
    return [
        ops.convert_to_numpy(ops.cast(value, "float32")).tobytes()
        for value in values
    ]
