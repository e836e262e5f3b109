"""Products with weights as TensorFlow computes them on a GPU, without one."""

import collections
import math

import keras
import numpy as np
import pytest
from keras import layers

import tfmix
from tests import helpers
from tests.ops import test_weights as weights
from tfmix._keras import context

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    from tfmix.ops import tensorflow_products
else:
    pytestmark = helpers.requires_backend("tensorflow")

# LoRA multiplies its two weights by each other, which is a float32 product.
MODELS = {*weights.MODELS} - {"adapted", "embedding", "layer_norm", "terms"}
PRODUCTS = ("MatMul", "Conv", "Depthwise", "Einsum")


def operations(graph, seen):
    """Lists all operations that results of a graph need."""
    todo = [tensor.op for tensor in graph.outputs]
    while todo:
        op = todo.pop()
        if op in seen:
            continue
        seen.add(op)
        yield op
        todo += [tensor.op for tensor in op.inputs]
        for value in op.node_def.attr.values():
            for name in [value.func.name, *(f.name for f in value.list.func)]:
                if name:
                    inner = graph._get_function(name).graph
                    yield from operations(inner, seen)


def product_dtypes(graph):
    """Counts the dtypes of all products that results of a graph need."""
    return collections.Counter(
        op.inputs[-1].dtype.name
        for op in operations(graph, set())
        if any(name in op.type for name in PRODUCTS)
    )


def gradients_of(model):
    """Returns the compiled gradients of a model's results, summed."""

    @tf.function
    def gradients(x, upstream=None):
        with tf.GradientTape() as tape:
            value = model(x, training=True)
        return tape.gradient(value, model.trainable_variables, upstream)

    return gradients


def step(name, policy):
    tfmix.set_global_policy(policy)
    make, x = weights.MODELS[name]
    model = keras.Sequential(make())
    model(x)
    return gradients_of(model).get_concrete_function(tf.constant(x))


@pytest.mark.costly
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_gpu_multiplies_16_bit_factors(name, policy):
    with context.compiled_for("cuda"):
        found = product_dtypes(step(name, policy).graph)
    assert set(found) == {policy.removeprefix("mixed_")}


def test_a_cpu_multiplies_wide_factors_for_weights():
    found = product_dtypes(step("dense", "mixed_float16").graph)
    assert found == {"float32": 1}


def summed(x, upstream):
    """Emulates a product that sums in float32 and rounds once."""

    def product(x, upstream, narrow):
        x, upstream = (np.asarray(t, "float64") for t in (x, upstream))
        return tf.constant(
            (x * upstream).sum(0).astype(narrow.dtype.as_numpy_dtype)
        )

    with context.compiled_for("cuda"):
        found = tensorflow_products._summed(
            product,
            [tf.constant(x), tf.constant(upstream), tf.constant(x[0])],
            len(x),
        )
    exact = (x.astype("float64") * upstream.astype("float64")).sum(0)
    error = np.linalg.norm(found.numpy() - exact) / np.linalg.norm(exact)
    return found, error


# The inputs of a layer are unscaled in float16. The incoming gradient is of
# order one, or smaller in the layers below.
@pytest.mark.parametrize("rows", [64, 4096, 2**18])
@pytest.mark.parametrize("inputs", [0.1, 1.0, 100.0, 5000.0])
@pytest.mark.parametrize("upstream", [1e-4, 1e-2, 1.0])
@pytest.mark.parametrize("is_alike", [False, True])
def test_a_scaled_sum_is_that_of_float32(rows, inputs, upstream, is_alike):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 8)) * inputs
    d = rng.normal(size=(rows, 8)) * upstream
    if is_alike:
        # All products have the same sign. Their mean is limited to 2^16 less
        # half of the rows' digits.
        x, d = np.abs(x), np.minimum(np.abs(d), 0.5 * upstream)
        d = d / max(1.0, math.sqrt(rows) * inputs * upstream / 2**16)
    found, error = summed(x.astype("float16"), d.astype("float16"))
    assert found.dtype == "float32"
    # Sums of less than 2^-14 have fewer digits.
    assert error < (0.002 if inputs * upstream > 1e-3 else 0.02)


def test_sixteen_bits_of_bfloat16_are_not_scaled():
    x = np.full((4096, 2), 1e20, tf.bfloat16.as_numpy_dtype)
    found, error = summed(x, x[:, ::-1] * 1e-30)
    assert error < 0.004


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("layer_class", [layers.LSTM, layers.GRU])
def test_recurrent_layers_take_the_kernel_of_cudnn(
    layer_class, policy, monkeypatch
):
    devices = tf.config.list_logical_devices

    def with_gpu(kind=None):
        return ["GPU:0"] if kind == "GPU" else devices(kind)

    monkeypatch.setattr(tf.config, "list_logical_devices", with_gpu)
    found = {}
    for name in ("keras", "tfmix"):
        if name == "tfmix":
            tfmix.set_global_policy(policy)
        else:
            keras.config.set_dtype_policy(policy)
        layer = layer_class(4)
        assert not layer.supports_jit
        step = tf.function(lambda x, layer=layer: layer(x, training=True))
        graph = step.get_concrete_function(tf.zeros((2, 5, 3))).graph
        found[name] = [
            (op.type, op.inputs[0].dtype.name)
            for op in graph.get_operations()
            if op.type.startswith("CudnnRNN")
        ]
    assert found["tfmix"] == found["keras"] != []


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("op", [keras.ops.add, keras.ops.subtract])
def test_the_gradient_of_a_bias_is_summed_in_float32(op, policy):
    tfmix.set_global_policy(policy)

    class Bias(layers.Layer):
        def build(self, shape):
            self.b = self.add_weight(shape=(1, *shape[-2:]))

        def call(self, x):
            return op(x, self.b)

    layer = Bias()
    layer.build((None, 2, 3))

    @tf.function
    def gradient(x):
        with tf.GradientTape() as tape:
            value = tf.cast(layer(x), "float32")
        # Their sum exceeds float16, and has more digits than bfloat16.
        upstream = tf.fill(tf.shape(value), 256.0)
        return tape.gradient(value, layer.b.value, upstream)

    x = tf.zeros((1024, 2, 3))
    with context.compiled_for("cuda"):
        graph = gradient.get_concrete_function(x).graph
        found = gradient(x)
    sign = -1 if op is keras.ops.subtract else 1
    np.testing.assert_array_equal(found, np.full((1, 2, 3), sign * 2.0**18))
    assert found.dtype == "float32"
    found = product_dtypes(graph)
    assert found == {policy.removeprefix("mixed_"): 1}
