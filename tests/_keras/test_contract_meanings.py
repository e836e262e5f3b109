"""Private names mean what tfmix relies on, where a change would be silent."""

import gc
import weakref

import keras
import numpy as np
import pytest

from tests._keras.contracts import jax_only, tensorflow_only, with_metrics
from tfmix._keras import context, layers, optimizers, tapes


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
    import tensorflow as tf

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
                (y,) = tapes.replaced([x * 2.0], [x], [], tripled, tripled)
            return tape.gradient(y, x)

        return float(slope(tf.constant(1.0)))

    assert make(held) == 3.0
    del held
    gc.collect()
    assert known() is None


@jax_only
def test_the_function_behind_a_custom_gradient_of_jax_is_found():
    import jax

    def rule(x):
        return x, lambda upstream: upstream

    for decorated in (jax.custom_gradient(rule), jax.custom_vjp(rule)):
        assert tapes.users_function(decorated) is rule


@jax_only
def test_a_transformation_is_told_from_the_one_around_it():
    import jax

    def within(transform):
        seen = []
        here = context.transformation()
        transform(lambda x: seen.append(context.transformation()) or x)
        assert context.transformation() == here
        return seen[0] == here

    x = np.ones((2, 2), "float32")
    assert within(lambda f: f(x))
    assert not within(lambda f: jax.vmap(f)(x))
    assert not within(lambda f: jax.jit(f)(x))
    assert not within(lambda f: jax.vjp(f, x))
    assert not within(lambda f: jax.checkpoint(f)(x))


def test_a_layer_run_as_an_earlier_call_is_in_its_mode_and_dtype():
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
            states.append(context.call_state())
            return self.inner(inputs)

    outer = Outer(dtype="mixed_float16")
    outer.build((2, 3))
    outer.inner.build((2, 3))
    outer(x, training=True)
    seen.clear()
    with context.as_called(states[-1]):
        outer.inner(x)
        dtype = keras.backend.standardize_dtype(outer.weight.value.dtype)
        assert dtype == "float16"
    outer.inner(x)
    assert seen == [True, None]


@jax_only
def test_a_constant_belongs_to_the_function_that_jax_compiles():
    import jax

    found = []

    def inner(x):
        found.append(jax.numpy.zeros(())._trace)
        return x * 2.0

    @jax.jit
    def outer(x):
        # It is kept alive, because equal addresses would prove nothing.
        found.append(jax.numpy.zeros(())._trace)
        return jax.grad(inner)(x) + jax.vmap(inner)(x[None])[0] + outer_too(x)

    outer_too = jax.jit(inner)
    outer(jax.numpy.ones(()))
    around, differentiated, mapped, compiled = found
    assert around is differentiated is mapped
    assert compiled is not around
    jax.grad(lambda x: found.append(jax.numpy.zeros(())) or x)(1.0)
    assert not isinstance(found[-1], jax.core.Tracer)


@tensorflow_only
@pytest.mark.parametrize("make", [lambda: keras.Variable([1.0]), keras.Layer])
def test_what_tensorflow_tracks_starts_with_self(make, tmp_path):
    import tensorflow as tf

    tracked = make()
    before = set(vars(tracked))
    tf.train.Checkpoint(one=tracked).write(str(tmp_path / "saved"))
    new = set(vars(tracked)) - before
    assert new
    assert all(name.startswith("_self_") for name in new)


def test_the_tracker_adds_only_variables_it_does_not_know():
    sgd = keras.optimizers.SGD()
    before = len(sgd.variables)
    known, unknown = keras.Variable([1.0]), keras.Variable([1.0])
    optimizers.count_as_tracked(sgd, known)
    sgd.known, sgd.unknown = known, unknown
    assert len(sgd.variables) == before + 1
    assert sgd.variables[-1] is unknown


@tensorflow_only
@pytest.mark.parametrize(("factor", "left"), [(1.0, 0.9), (2.0, 0.8)])
def test_apply_takes_what_sums_the_gradients_over_the_replicas(factor, left):
    sgd, variable, calls = keras.optimizers.SGD(0.1), keras.Variable([1.0]), []
    sgd.build([variable])

    def total(pairs):
        calls.append([variable for _, variable in pairs])
        return [(factor * gradient, variable) for gradient, variable in pairs]

    vars(sgd)["_all_reduce_sum_gradients"] = total
    sgd.apply([keras.ops.ones((1,))], [variable])
    assert calls == [[variable.value]]
    assert float(variable.value[0]) == pytest.approx(left)


def test_preprocessing_layers_have_one_base_above_rescaling():
    assert layers.DATA_LAYER.__name__ in ("DataLayer", "TFDataLayer")
    for name in (
        *("Normalization", "Discretization", "CategoryEncoding"),
        *("RandomFlip", "CenterCrop", "MelSpectrogram"),
    ):
        assert issubclass(getattr(keras.layers, name), layers.DATA_LAYER)
    assert not issubclass(keras.layers.Dense, layers.DATA_LAYER)


def test_the_call_context_names_the_outermost_layer():
    entries, x = [], np.ones((2, 3, 4))

    class Inner(keras.layers.Layer):
        def call(self, inputs):
            entries.append(context.entry_layer())
            return inputs

    inner = Inner()
    model = keras.Sequential([inner])
    model.build((2, 3, 4))
    entries.clear()
    model(x)
    inner(x)
    assert entries == [model, inner]
    assert context.entry_layer() is None


@pytest.mark.costly
def test_metrics_of_compile_are_known_before_they_are_built():
    model = with_metrics()
    (given,) = model._compile_metrics._user_metrics
    assert given not in model.metrics
    assert given in layers.metrics(model)
    x = np.ones((2, 3, 4))
    model.fit(x, 0.0 * model.predict(x, verbose=0), verbose=0)
    assert layers.metrics(model) == model.metrics
