"""TensorFlow's graphs, functions and tapes describe themselves like this."""

import keras
import numpy as np
import pytest

from tests._keras.contracts import tensorflow_only


@tensorflow_only
@pytest.mark.parametrize("jit", [True, False])
def test_a_graph_knows_whether_it_becomes_part_of_an_xla_program(jit):
    import tensorflow as tf

    found = []

    def contexts(graph):
        while graph is not None:
            context = graph._get_control_flow_context()
            while context is not None:
                yield context
                context = context.outer_context
            graph = getattr(graph, "outer_graph", None)

    def look():
        graph = tf.compat.v1.get_default_graph()
        found.append(any(each.IsXLAContext() for each in contexts(graph)))
        return 1.0

    @tf.function(jit_compile=jit, autograph=False)
    def step(x):
        look()
        return tf.cond(x > 0.0, look, lambda: 0.0)

    step(tf.constant(1.0))
    # It holds in the function itself, and in a branch, through the outer graph.
    assert found == [jit, jit]


@tensorflow_only
def test_reads_of_a_variable_are_distinguished_from_writes():
    import tensorflow as tf

    variable = tf.Variable([1.0, 2.0])

    def kinds(use):
        @tf.function(autograph=False)
        def run():
            use()
            graph = tf.compat.v1.get_default_graph()
            users = graph.capture(variable.handle).consumers()
            seen.append({user.type for user in users})

        seen = []
        run()
        return seen[0]

    assert kinds(lambda: variable + 1.0) == {"ReadVariableOp"}
    assert kinds(lambda: tf.gather(variable, [0])) == {"ResourceGather"}
    assert kinds(variable.is_initialized) == {"VarIsInitializedOp"}
    assert kinds(lambda: tf.shape(variable)) <= {
        "ReadVariableOp",
        "VariableShape",
    }
    assert "AssignVariableOp" in kinds(lambda: variable.assign([3.0, 4.0]))
    assert "AssignAddVariableOp" in kinds(
        lambda: variable.assign_add([3.0, 4.0])
    )
    # A separately traced function takes the handle and is a user itself.
    inner = tf.function(lambda: variable.assign([3.0, 4.0]))
    assert kinds(inner) - {"ReadVariableOp"}


@pytest.mark.costly
@tensorflow_only
def test_a_custom_gradient_lives_no_longer_than_its_graph():
    import gc
    import weakref

    import tensorflow as tf

    from tfmix._keras import gradients

    class Held:
        pass

    held = Held()
    known = weakref.ref(held)

    def make(held):
        def tripled(upstream):
            return [(held, upstream * 3.0)[1]]

        @tf.function
        def slope(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                (y,) = gradients.replaced([x * 2.0], [x], [], tripled, tripled)
            return tape.gradient(y, x)

        return float(slope(tf.constant(1.0)))

    assert make(held) == 3.0
    del held
    gc.collect()
    assert known() is None


def test_a_layer_run_as_an_earlier_call_is_in_its_mode_and_dtype():
    from tfmix._keras import layers

    seen, states, x = [], [], np.ones((2, 3))

    class Inner(keras.layers.Layer):
        def call(self, inputs, training=None):
            seen.append(training)
            return inputs

    class Outer(keras.layers.Layer):
        def __init__(self, **settings):
            super().__init__(**settings)
            self.inner = Inner()

        def build(self, shape):
            self.weight = self.add_weight(shape=())

        def call(self, inputs):
            states.append(layers.call_state())
            return self.inner(inputs)

    outer = Outer(dtype="mixed_float16")
    outer.build((2, 3))
    outer.inner.build((2, 3))
    outer(x, training=True)
    seen.clear()
    with layers.as_called(states[-1]):
        outer.inner(x)
        dtype = keras.backend.standardize_dtype(outer.weight.value.dtype)
        assert dtype == "float16"
    outer.inner(x)
    assert seen == [True, None]
