"""Keras's layers use their private names like this."""

import keras

from tests._keras.contracts import (
    batch,
    common,
    dense,
    tensorflow_only,
)
from tfmix._keras import attempts, layers


def test_a_layer_calls_check_super_called_before_it_casts_or_builds():
    layer = keras.layers.Dense(4)
    seen = []

    def hook():
        seen.append((layer._called, layer.built))
        layer.__dict__["_dtype_policy"] = keras.DTypePolicy("float16")

    layer.__dict__["_check_super_called"] = hook
    result = layer(batch())
    # Keras calls it again in `build` and `add_weight`, during the build.
    assert seen[0] == (False, False)
    # The first call computes in the policy that the hook has set.
    assert keras.backend.standardize_dtype(result.dtype) == "float16"
    assert layer._called
    assert layer.built
    seen.clear()
    layer(batch())
    assert seen == [(True, True)]


def test_the_seed_generators_are_those_of_layers_that_draw():
    layer = keras.layers.Dropout(0.5)
    (generator,) = layer._seed_generators
    assert not dense()._seed_generators
    # Its dtype is that of counters under TensorFlow.
    assert generator.state.name == "seed_generator_state"
    assert layer.non_trainable_variables == [generator.state]


def test_the_call_context_names_the_outermost_layer():
    entries = []
    state = common("global_state")

    class Inner(keras.layers.Layer):
        def call(self, inputs):
            context = state.get_global_attribute("current_call_ctx")
            entries.append(context.entry_layer)
            return inputs

    inner = Inner()
    model = keras.Sequential([inner])
    model.build((2, 3, 4))
    entries.clear()
    model(batch())
    inner(batch())
    assert entries == [model, inner]
    assert state.get_global_attribute("current_call_ctx") is None


def test_a_stateless_scope_maps_the_id_of_a_variable_to_its_value():
    get = common("stateless_scope").get_stateless_scope
    one, other = keras.Variable([1.0]), keras.Variable([2.0])
    assert get() is None
    with keras.StatelessScope([(one, one.value)]) as scope:
        assert get() is scope
        assert list(scope.state_mapping) == [id(one)]
        assert scope.get_current_value(one) is not None
        assert scope.get_current_value(other) is None
        assert scope.losses == []
        one.assign([5.0])
        assert float(scope.get_current_value(one)[0]) == 5.0
        # After it is restored, nothing counts as assigned.
        scope.state_mapping = {}
        assert float(one.value[0]) == 1.0


@tensorflow_only
def test_a_separate_graph_takes_tensors_and_assigns_nothing():
    import tensorflow as tf

    variable, seen = keras.Variable(1.0), []

    @tf.function(autograph=False)
    def step(x):
        with attempts.scratch():
            seen.append(tf.compat.v1.get_default_graph())
            variable.assign(x * variable)
        seen.append(tf.compat.v1.get_default_graph())
        return x

    assert float(step(2.0)) == 2.0
    assert seen[0] is not seen[1]
    assert float(variable.value) == 1.0


def test_preprocessing_layers_have_one_base_above_rescaling():
    assert layers.DATA_LAYER.__name__ in ("DataLayer", "TFDataLayer")
    for name in (
        *("Normalization", "Discretization", "CategoryEncoding"),
        *("RandomFlip", "CenterCrop", "MelSpectrogram"),
    ):
        assert issubclass(getattr(keras.layers, name), layers.DATA_LAYER)
    assert not issubclass(keras.layers.Dense, layers.DATA_LAYER)
