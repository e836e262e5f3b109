"""Shared by tests: tolerances, lists of optimizers, comparisons."""

import contextlib
import functools
import pathlib
import tempfile

import keras
import numpy as np
import pytest

from tfmix._keras import layers
from tfmix.gradient_scaling import model_call

ON_JAX = keras.backend.backend() == "jax"
# Results in a dtype are compared with its tolerance. The unit is the format's
# epsilon, and the factor is the number of roundings that may differ.
TOLERANCES = {
    # Sums of about a hundred products may be in different orders.
    "float32": 64 * 2.0**-23,
    # Inputs and outputs are rounded once each, by up to half a step.
    "float16": 4 * 2.0**-10,
    # The factor is float16's, because eight bits leave no room for more.
    "bfloat16": 4 * 2.0**-7,
}

# The arguments are not the defaults, so that tests notice a field that a
# configuration or a file loses.
OPTIMIZERS = {
    "Adadelta": {"learning_rate": 0.5, "rho": 0.9, "epsilon": 1e-6},
    "Adafactor": {"learning_rate": 0.02, "beta_2_decay": -0.7},
    "Adagrad": {"learning_rate": 0.05, "initial_accumulator_value": 0.2},
    "Adam": {"learning_rate": 0.02, "beta_1": 0.8, "amsgrad": True},
    "AdamW": {"learning_rate": 0.02, "beta_2": 0.99, "weight_decay": 0.01},
    "Adamax": {"learning_rate": 0.02, "beta_1": 0.8, "epsilon": 1e-6},
    "Ftrl": {"learning_rate": 0.05, "l2_regularization_strength": 0.001},
    "Lamb": {"learning_rate": 0.02, "beta_1": 0.8, "epsilon": 1e-6},
    "Lion": {"learning_rate": 0.005, "beta_2": 0.95},
    "Muon": {"learning_rate": 0.02, "momentum": 0.9, "nesterov": False},
    "Nadam": {"learning_rate": 0.02, "beta_2": 0.99},
    "RMSprop": {"learning_rate": 0.02, "momentum": 0.5, "centered": True},
    "SGD": {"learning_rate": 0.05, "momentum": 0.9, "nesterov": True},
    # This optimizer is not in the oldest supported Keras.
    "ScheduleFreeAdamW": {"learning_rate": 0.02, "warmup_steps": 3},
}

# The base class and the wrappers cannot be created without arguments.
WRAPPERS = ("LossScaleOptimizer", "MultiOptimizer", "Optimizer")


def optimizer_names():
    """Returns the names in `OPTIMIZERS` that the installed Keras has."""
    return [name for name in OPTIMIZERS if hasattr(keras.optimizers, name)]


def quick_are(quick, values):
    """Returns values as pytest parameters, all but `quick` marked as slow.

    A tuple holds the values of several parameters.
    """
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=() if value in quick else pytest.mark.slow,
        )
        for value in values
    ]


def optimizers_of_a_kind():
    """Returns the names, all but one of each kind marked as slow."""
    return quick_are({"SGD", "Adam", "Muon"}, optimizer_names())


def make_optimizer(name, **overrides):
    """Builds one of Keras's optimizers with non-default arguments."""
    settings = {**OPTIMIZERS[name], **overrides}
    return getattr(keras.optimizers, name)(**settings)


def requires_backend(name):
    """Marks a test that only makes sense on one backend of Keras."""
    current = keras.backend.backend()
    return pytest.mark.skipif(
        current != name,
        reason=f"needs KERAS_BACKEND={name}, which is {current}",
    )


def with_gradients(function, *tensors, upstream=None):
    """Returns a function's result, and its gradients by its arguments.

    Without the gradient `upstream`, they are those of the result's sum.
    """
    tensors = [keras.ops.convert_to_tensor(each) for each in tensors]
    if ON_JAX:
        import jax

        found, back = jax.vjp(function, *tensors)
        if upstream is None:
            upstream = keras.ops.ones_like(found)
        return found, *back(upstream)
    import tensorflow as tf

    with tf.GradientTape() as tape:
        tape.watch(tensors)
        found = function(*tensors)
    return found, *tape.gradient(found, tensors, upstream)


class Calls(keras.layers.Layer):
    """Computes a function of its input."""

    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.function = function

    def call(self, x):
        return self.function(x)


def dtype_of(tensor):
    """Returns the name of a tensor's dtype."""
    return keras.backend.standardize_dtype(tensor.dtype)


def reloaded(model, **settings):
    """Saves a model in a file, and loads it."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "model.keras")
        model.save(path)
        return keras.saving.load_model(path, **settings)


def is_guarded(model):
    """Returns whether a skipped step of a model leaves no trace."""
    return layers.part(model, layers.GUARD) is not None


def takes_scaled_gradients(optimizer):
    """Prepares an optimizer for gradients that a test scales itself."""
    optimizer.scale_loss(1.0)


@functools.cache
def mirrored_strategy(num_replicas=2):
    """Returns the only MirroredStrategy of the test run (TensorFlow only).

    TensorFlow numbers the collectives of each strategy from 100 up, so two
    strategies in one process would mix up their collectives.
    """
    import tensorflow as tf

    return tf.distribute.MirroredStrategy(
        [f"CPU:{n}" for n in range(num_replicas)]
    )


def tolerance(dtype):
    """Returns the `rtol` and `atol` for comparing results of a dtype."""
    bound = TOLERANCES[keras.backend.standardize_dtype(dtype)]
    return {"rtol": bound, "atol": bound}


def to_numpy(value):
    """Copies a tensor, variable or array to float64, integers to integers."""
    array = np.asarray(keras.ops.convert_to_numpy(value))
    # NumPy's comparisons do not support the type of bfloat16.
    if array.dtype.kind in "biu":
        return array
    return array.astype("float64")


def snapshot(variables):
    """Copies variables for a later comparison."""
    return [
        np.array(keras.ops.convert_to_numpy(v), copy=True) for v in variables
    ]


def assert_close(actual, expected, dtype):
    """Fails unless two arrays agree to the tolerance of `dtype`."""
    np.testing.assert_allclose(
        to_numpy(actual), to_numpy(expected), **tolerance(dtype)
    )


def assert_same_bits(actual, expected):
    """Fails unless two arrays have one dtype, one shape and the same bits.

    Unlike `==`, a NaN equals a NaN of the same bits and 0.0 is not -0.0.
    """
    left = np.ascontiguousarray(keras.ops.convert_to_numpy(actual))
    right = np.ascontiguousarray(keras.ops.convert_to_numpy(expected))
    assert left.dtype == right.dtype, f"{left.dtype} is not {right.dtype}"
    assert left.shape == right.shape, f"{left.shape} is not {right.shape}"
    different = int(np.sum(_bytes(left) != _bytes(right)))
    assert not different, f"{different} bytes differ:\n{left}\n{right}"


def assert_unchanged(variables, before):
    """Fails unless variables have exactly the bits of their `snapshot`."""
    assert len(variables) == len(before), "the number of variables changed"
    for variable, value in zip(variables, before, strict=True):
        try:
            assert_same_bits(variable, value)
        except AssertionError as error:
            name = getattr(variable, "path", variable)
            raise AssertionError(f"{name} changed: {error}") from error


def assert_all_finite(values):
    """Fails if any of the arrays holds an infinity or a NaN."""
    values = list(values)
    assert values, "there is nothing to check"
    for value in values:
        bad = int(np.sum(~np.isfinite(to_numpy(value))))
        name = getattr(value, "path", "array")
        assert not bad, f"{name} has {bad} entries that are not finite"


def notebook_html(report):
    """Returns a report's HTML, as a notebook shows it."""
    return report._repr_mimebundle_([], [])["text/html"]


def _bytes(array):
    return np.frombuffer(array.tobytes(), dtype="uint8")


@contextlib.contextmanager
def without_gates():
    """Calls models without gates, so that gradients are not scaled."""

    def call(model, compute, args, kwargs):
        return compute(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_call, "between_gates", call)
        yield
