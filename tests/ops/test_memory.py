"""What is noted on tensors lives no longer than the tensors are used."""

import collections
import gc
import weakref

import keras
import numpy as np
import pytest

import tfmix
from tests import helpers
from tfmix.ops import tensors

LAYERS = 8
# The results of these ops of TensorFlow lie where their arguments do.
SAME_BUFFER = frozenset(
    "Const Identity IdentityN Placeholder ReadVariableOp Reshape StopGradient "
    "VarHandleOp".split()
)


@pytest.fixture
def copies(monkeypatch):
    """Lists how many copies of weights are alive as each one is made."""
    references, alive = [], []
    make = tensors.noted_copy

    def noting(source, copy, is_weight):
        if is_weight:
            references.extend(map(weakref.ref, (source, copy)))
            alive.append(sum(made() is not None for made in references))
        return make(source, copy, is_weight)

    monkeypatch.setattr(tensors, "noted_copy", noting)
    # A cycle would hold them until Python looks for cycles.
    gc.collect()
    gc.disable()
    yield lambda: sum(made() is not None for made in references), alive
    gc.enable()


def network(size=16):
    tfmix.set_global_policy("mixed_float16")
    model = keras.Sequential([keras.Input((size,))])
    for _ in range(LAYERS):
        model.add(keras.layers.Dense(size, activation="relu"))
    return model, keras.ops.convert_to_tensor(np.ones((4, size), "float32"))


def test_a_call_holds_the_copies_of_a_layer_and_of_the_one_before(copies):
    model, x = network()
    model(x)
    held = [id(v.value) for v in model.weights] if helpers.ON_JAX else []
    now, alive = copies
    # JAX's variables are the float32 weights themselves.
    assert now() == len(held)
    assert max(alive) - len(held) <= 8 < 2 * LAYERS


def test_a_compiled_gradient_holds_no_float32_copies_of_weights():
    model, _ = network(size=64)
    weights = 4 * model.count_params()
    # The result of TensorFlow's graph is as large as the weights.
    others = peak_in_graph(model) - (0 if helpers.ON_JAX else weights)
    assert others < 2 * weights / LAYERS


def test_a_step_leaves_no_copy(copies):
    model, x = network()
    for _ in range(2):
        train(model, x)
    assert copies[0]() == 0


def peak_in_graph(model):
    """Returns the most bytes that a compiled gradient holds at once.

    XLA knows that; TensorFlow's graph is run in the order of its ops.
    """
    if helpers.ON_JAX:
        import jax

        weights = [v.value for v in model.weights]
        x = np.ones((4, 64), "float32")
        compiled = jax.jit(lambda w, x: train(model, x, w)).lower(weights, x)
        return compiled.compile().memory_analysis().temp_size_in_bytes
    import tensorflow as tf

    function = tf.function(lambda x: train(model, x), autograph=False)
    spec = tf.TensorSpec((4, 64))
    graph = function.get_concrete_function(spec).graph
    ops = graph.get_operations()
    used = {x.ref(): n for n, op in enumerate(ops) for x in op.inputs}
    used |= {x.ref(): len(ops) for x in graph.outputs}
    live, peak, ends = 0, 0, collections.Counter()
    for n, op in enumerate(ops):
        for result in op.outputs:
            if op.type not in SAME_BUFFER and result.ref() in used:
                size = result.shape.num_elements() * result.dtype.size
                live += size
                ends[used[result.ref()]] += size
        peak = max(peak, live)
        live -= ends[n]
    return peak


def train(model, x, weights=None):
    if helpers.ON_JAX:
        import jax

        def loss(weights):
            return keras.ops.sum(model.stateless_call(weights, [], x)[0])

        return jax.grad(loss)(weights or [v.value for v in model.weights])
    import tensorflow as tf

    with tf.GradientTape() as tape:
        loss = keras.ops.sum(model(x, training=True))
    return tape.gradient(loss, model.trainable_variables)


def test_a_note_dies_with_its_tensor():
    class Value:
        pass

    value, tensor = Value(), keras.ops.ones(3)
    tensors.put_note(tensor, tensors.COPY, value)
    assert tensors.note(tensor) is value
    left = weakref.ref(value)
    del value, tensor
    gc.collect()
    assert left() is None
