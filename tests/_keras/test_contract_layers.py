"""Keras's layers use their private names like this."""

import importlib

import keras

from tests._keras.contracts import (
    batch,
    common,
    dense,
    functional,
    sequential,
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


def test_a_layers_policy_is_its_dtype_policy_attribute():
    layer = dense()
    layer.__dict__["_dtype_policy"] = keras.DTypePolicy("mixed_bfloat16")
    assert layer.compute_dtype == "bfloat16"
    assert layer.variable_dtype == "float32"
    assert layer.dtype_policy is vars(layer)["_dtype_policy"]


def test_the_setter_of_a_layers_policy_writes_into_the_users_map():
    # This is why tfmix does not use it.
    policies = keras.dtype_policies.DTypePolicyMap()
    layer = keras.layers.Dense(4, dtype=policies, name="one")
    layer(batch())
    assert layer._dtype_policy is policies
    assert not dict(policies)
    layer.dtype_policy = "float16"
    assert list(policies) == ["one"]


def test_the_parent_path_is_the_path_of_the_scope_of_the_first_call():
    seen = []

    class Outer(keras.layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.inner = keras.layers.Dense(4, name="inner")

        def call(self, inputs):
            current = common("name_scope").current_path()
            seen.append((self.inner._parent_path, current))
            return self.inner(inputs)

    outer = Outer(name="outer")
    outer(batch())
    assert common("name_scope").current_path() == ""
    assert seen[0] == (None, "outer")
    assert outer.inner._parent_path == "outer"
    assert outer.inner.path == "outer/inner"


def test_a_layer_knows_the_remat_scope_it_was_made_in():
    with keras.RematScope(mode="full"):
        assert dense()._remat_mode.mode == "full"
    assert dense()._remat_mode is None


def test_layers_holds_the_direct_parts_of_a_layer():
    class Outer(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.one = keras.Sequential([dense()])
            self.two = [dense()]

    outer = Outer()
    assert outer._layers == [outer.one, outer.two[0]]


def test_the_own_variables_of_a_layer_are_not_those_of_its_parts():
    layer = keras.layers.BatchNormalization()
    outer = keras.Sequential([layer])
    outer(batch())
    assert layer._trainable_variables == [layer.gamma, layer.beta]
    assert layer._non_trainable_variables == [
        layer.moving_mean,
        layer.moving_variance,
    ]
    assert outer._trainable_variables == outer._non_trainable_variables == []
    # Freezing moves nothing between the lists.
    layer.trainable = False
    assert layer._trainable_variables == [layer.gamma, layer.beta]


def test_the_seed_generators_are_those_of_layers_that_draw():
    layer = keras.layers.Dropout(0.5)
    (generator,) = layer._seed_generators
    assert not dense()._seed_generators
    # Its dtype is that of counters under TensorFlow.
    assert generator.state.name == "seed_generator_state"
    assert layer.non_trainable_variables == [generator.state]


def test_the_training_argument_is_known_of_a_models_call():
    class Plain(keras.Model):
        def call(self, inputs):
            return inputs

    assert not Plain()._call_has_training_arg
    assert sequential()._call_has_training_arg
    assert functional()._call_has_training_arg


def test_the_build_shapes_are_those_of_the_first_call():
    class Plain(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = dense()

        def build(self, input_shape):
            self.inner.build(input_shape)

        def call(self, inputs):
            return self.inner(inputs)

    model = Plain()
    assert model._build_shapes_dict is None
    model(batch())
    assert list(model._build_shapes_dict.values()) == [(2, 3, 4)]


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


def test_the_symbolic_scope_is_open_while_shapes_are_inferred():
    inside = common("symbolic_scope").in_symbolic_scope
    seen = []

    class Layer(keras.layers.Layer):
        def call(self, inputs):
            seen.append(inside())
            return inputs

    layer = Layer()
    layer(batch())
    layer(keras.Input((3, 4)))
    assert seen == [False, True]
    assert not inside()


def test_compute_output_spec_runs_on_symbols():
    run = importlib.import_module("keras.src.backend").compute_output_spec
    given = keras.KerasTensor((None, 4), "float32")
    result = run(lambda x, y: keras.ops.sum(x * y, axis=1), given, given)
    assert isinstance(result, keras.KerasTensor)
    assert result.shape == (None,)


def test_the_autocast_scope_decides_what_variables_are_read_in():
    variable = keras.Variable([1.0])
    with common("variables").AutocastScope("float16"):
        inside = variable.value
        with common("variables").AutocastScope(None):
            uncast = variable.value
    standardize = keras.backend.standardize_dtype
    assert standardize(inside.dtype) == "float16"
    assert standardize(uncast.dtype) == "float32"


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


def test_a_stateless_scope_collects_added_losses():
    layer = keras.layers.Dense(4, activity_regularizer="l2")
    layer(batch())
    with keras.StatelessScope(collect_losses=True) as scope:
        layer(batch())
        assert len(scope.losses) == 1


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


def test_a_layer_keeps_its_added_losses_in_a_list_that_can_be_cleared():
    layer = keras.layers.Dense(4, activity_regularizer="l2")
    layer(batch())
    assert len(layer._losses) == 1
    layer._losses.clear()
    layer._loss_ids.clear()
    assert layer.losses == []


def test_a_layer_reads_the_mask_that_set_keras_mask_sets():
    masking = common("masking")
    tensor, mask = batch(2, 3), keras.ops.ones((2, 3), "bool")
    assert masking.get_keras_mask(tensor) is None
    masking.set_keras_mask(tensor, mask)
    assert masking.get_keras_mask(tensor) is mask
    seen = []

    class Layer(keras.layers.Layer):
        supports_masking = True

        def call(self, inputs, mask=None):
            seen.append(mask)
            return inputs

    Layer()(tensor)
    assert seen == [mask]


def test_the_marks_of_tensors_are_kept_where_keras_keeps_masks():
    marks = common("tensor_attributes")
    tensor, mask = batch(2, 3), keras.ops.ones((2, 3), "bool")
    assert marks.get_tensor_attr(tensor, "_tfmix_test") is None
    marks.set_tensor_attr(tensor, "_tfmix_test", 3)
    assert marks.get_tensor_attr(tensor, "_tfmix_test") == 3
    assert marks.get_tensor_attr(tensor + 1, "_tfmix_test") is None
    common("masking").set_keras_mask(tensor, mask)
    assert marks.get_tensor_attr(tensor, "_keras_mask") is mask


def test_preprocessing_layers_have_one_base_above_rescaling():
    assert layers.DATA_LAYER.__name__ in ("DataLayer", "TFDataLayer")
    for name in (
        *("Normalization", "Discretization", "CategoryEncoding"),
        *("RandomFlip", "CenterCrop", "MelSpectrogram"),
    ):
        assert issubclass(getattr(keras.layers, name), layers.DATA_LAYER)
    assert not issubclass(keras.layers.Dense, layers.DATA_LAYER)
