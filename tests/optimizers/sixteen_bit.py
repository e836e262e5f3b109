"""Shared by the tests of the 16-bit optimizers."""

import keras
import numpy as np
from keras import ops

import tfmix
from tests import steps
from tfmix.optimizers import bfloat16_optimizer, low_memory, master_weights

# Most sizes leave SIMD registers partly filled; one fills them. The largest is
# large enough for 8-bit state.
SHAPES = [(7, 5), (5,), (67, 63), (16, 3)]

# Every way to keep the bits that bfloat16 lacks.
WAYS = {
    "masters": master_weights.MasterWeightOptimizer,
    "stochastic": lambda inner: bfloat16_optimizer.BFloat16Optimizer(
        inner, seed=7
    ),
}
# And 8-bit state of float32 variables.
STATES = WAYS | {
    "low memory": lambda inner: low_memory.LowMemoryOptimizer(inner, seed=7)
}


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


def run(optimizer, model_variables, gradients, jit=False):
    """Applies gradients in a compiled function, as `fit` does."""
    mode = steps.MODES[-1 if jit else 1]
    step = steps.stepper(optimizer, model_variables, mode)
    for grads in gradients:
        step(grads)


X = np.random.default_rng(0).normal(size=(64, 64)).astype("float32")
Y = np.tanh(X @ np.random.default_rng(1).normal(size=(64, 64)))


def model_of(optimizer, policy="float32", mode=None):
    """Compiles a model whose kernels are large enough for 8-bit state."""
    keras.utils.set_random_seed(1)
    settings = {"run_eagerly": mode == "eager"}
    if mode in ("graph", "xla"):
        settings["jit_compile"] = mode == "xla"
    with tfmix.policy_scope(policy):
        layers = [keras.layers.Dense(128, "relu"), keras.layers.Dense(64)]
        model = keras.Sequential([keras.Input((64,)), *layers])
        model.compile(optimizer, "mse", **settings)
    return model


def fit(model, epochs=4):
    """Trains `model_of`; returns the losses of the epochs."""
    settings = {"batch_size": 32, "verbose": 0, "shuffle": False}
    return model.fit(X, Y, epochs=epochs, **settings).history["loss"]


def coded(optimizer):
    """Lists the variables of an optimizer that hold 8-bit state."""
    return [v for v in optimizer.variables if "int8" in v.dtype]


def bits_of(values):
    """Returns the exact content of variables or tensors, to compare by `==`."""
    return [
        ops.convert_to_numpy(ops.cast(value, "float32")).tobytes()
        for value in values
    ]
