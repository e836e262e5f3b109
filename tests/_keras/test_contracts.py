"""What tfmix asks of the private side of Keras and TensorFlow, name by name.

Each name that `tfmix/_keras/` reaches into is in one of the tables: it is
there, and takes these arguments. The tests below them say what it means and
who calls it. A version of Keras that breaks tfmix breaks a test here first,
which says by its name what changed.
"""

import contextlib
import importlib
import inspect
import pathlib
import re
import threading
import types

import keras
import numpy as np
import pytest

import tfmix
from tests import helpers
from tests._keras import private_names
from tfmix._keras import attempts, op_places, training

OURS = pathlib.Path(tfmix.__file__).parent
BACKEND = keras.backend.backend()
KERAS = tuple(int(part) for part in keras.__version__.split(".")[:2])
COMMON = "keras.src.backend.common"
OPS = "keras.src.ops"
FUNCTION = "tensorflow.python.eager.polymorphic_function.polymorphic_function"
XLA = "tensorflow.compiler.tf2xla.ops.gen_xla_ops"

tensorflow_only = helpers.requires_backend("tensorflow")
jax_only = helpers.requires_backend("jax")

# Names that belong to one backend, and those of some versions of Keras.
TENSORFLOW_ONLY = {
    "_all_reduce_sum_gradients",
    "_distribution_strategy",
    "_export_to_saved_model_graph",
    "_get_control_flow_context",
    "_restore_from_tensors",
    "_run_functions_eagerly",
    "_serialize_to_tensors",
    "_unique_id",
    "_write_object_proto",
    "Function",
    "CondBranchFuncGraph",
    "capture",
    "could_possibly_record",
    "pack_tangents",
    "xla_optimization_barrier",
    "xla_reduce",
    "xla_variadic_reduce_v2",
}
SINCE = {
    # `keras.optimizers.MultiOptimizer` is not in Keras 3.12.
    "_var_to_optimizer_idx": (3, 15),
    "BaseTrainer": (3, 16),
    "_is_excluded_from_weight_decay": (3, 16),
    "_weight_decay_by_var_key": (3, 16),
    "ops": (3, 16),
}
UNTIL = {
    "Trainer": (3, 15),
    "_exclude_from_weight_decay_cache": (3, 15),
}
TRAINER = "keras.src.trainers.trainer." + (
    "BaseTrainer" if KERAS >= SINCE["BaseTrainer"] else "Trainer"
)

# What is only named as a place to look in.
PACKAGES = (
    "keras.src",
    "keras.src.backend",
    OPS,
)

# (owner, attribute, the arguments it takes, further ones having defaults)
SWAP = "keras.src.callbacks.swap_ema_weights"
FUNCTIONS = [
    (f"{COMMON}.global_state", "get_global_attribute", "name default"),
    (f"{COMMON}.global_state", "set_global_attribute", "name value"),
    (f"{COMMON}.masking", "get_keras_mask", "x"),
    (f"{COMMON}.masking", "set_keras_mask", "x mask"),
    (f"{COMMON}.name_scope", "current_path", ""),
    (f"{COMMON}.stateless_scope", "get_stateless_scope", ""),
    (f"{COMMON}.symbolic_scope", "in_symbolic_scope", ""),
    (f"{COMMON}.tensor_attributes", "get_tensor_attr", "tensor attr"),
    (f"{COMMON}.tensor_attributes", "set_tensor_attr", "tensor attr value"),
    (f"{COMMON}.variables", "AutocastScope", "dtype"),
    (f"{COMMON}.variables", "get_autocast_scope", ""),
    ("keras.src.backend", "compute_output_spec", "fn *args **kwargs"),
    (f"{SWAP}.SwapEMAWeights", "_swap_variables", "self"),
    (f"{SWAP}.SwapEMAWeights", "_finalize_ema_values", "self"),
    ("keras.src.models.functional.Functional", "call", "self inputs"),
    ("keras.src.saving.serialization_lib", "SafeModeScope", "safe_mode"),
    ("keras.src.trainers.compile_utils", "CompileLoss", "loss loss_weights"),
    (TRAINER, "_aggregate_additional_loss", "self loss"),
    (
        TRAINER,
        "_compute_loss",
        "self x y y_pred sample_weight training",
    ),
    ("keras.Model", "_aggregate_additional_loss", "self loss"),
    ("keras.Model", "_symbolic_build", "self iterator data_batch"),
    (
        "keras.Model",
        "_compute_loss",
        "self x y y_pred sample_weight training",
    ),
    ("keras.Layer", "_check_super_called", "self"),
    ("keras.Layer", "_get_own_losses", "self"),
    (
        "keras.Layer",
        "rematerialized_call",
        "self layer_call *args **kwargs",
    ),
    (
        "keras.layers.MultiHeadAttention",
        "_compute_attention",
        "self query key value attention_mask training return_attention_scores",
    ),
    (
        "keras.layers.GroupQueryAttention",
        "_compute_attention",
        "self query key value attention_mask training",
    ),
    ("keras.StatelessScope", "get_current_value", "self variable"),
    ("keras.Variable", "_initialize", "self value"),
    ("keras.Variable", "_restore_from_tensors", "self restored_tensors"),
    ("keras.Variable", "_serialize_to_tensors", "self"),
    (
        "keras.Variable",
        "_export_to_saved_model_graph",
        "self object_map tensor_map options",
    ),
    ("keras.Variable", "_write_object_proto", "self proto options"),
    (
        "keras.optimizers.Optimizer",
        "_all_reduce_sum_gradients",
        "self grads_and_vars",
    ),
    (
        "keras.optimizers.Optimizer",
        "_check_variables_are_known",
        "self variables",
    ),
    ("keras.optimizers.Optimizer", "_get_variable_index", "self variable"),
    (
        "keras.optimizers.Optimizer",
        "_is_excluded_from_weight_decay",
        "self variable",
    ),
    (
        "keras.optimizers.Optimizer",
        "_overwrite_variable_with_gradient",
        "self variable",
    ),
    ("keras.optimizers.Optimizer", "_use_weight_decay", "self variable"),
    ("keras.optimizers.Optimizer", "_var_key", "self variable"),
    (XLA, "xla_optimization_barrier", "input name"),
    (
        XLA,
        "xla_call_module",
        "args version module Sout Tout",
    ),
    (
        XLA,
        "xla_reduce",
        "input init_value dimensions_to_reduce reducer name",
    ),
    (
        XLA,
        "xla_variadic_reduce_v2",
        "inputs init_values dimensions_to_reduce reducer",
    ),
    ("tensorflow.Graph", "_get_control_flow_context", "self"),
    ("tensorflow.__internal__.FuncGraph", "capture", "self tensor"),
    ("tensorflow.python.eager.record", "could_possibly_record", ""),
    ("tensorflow.python.eager.forwardprop_util", "pack_tangents", "tensors"),
]

# (owner, attribute, its type)
CONSTANTS = [
    (
        "tensorflow.python.ops.control_flow_v2_func_graphs",
        "CondBranchFuncGraph",
        type,
    ),
    (f"{COMMON}.global_state", "GLOBAL_STATE_TRACKER", threading.local),
    ("keras.src.backend", "ops", types.ModuleType),
    ("keras.src.models.functional", "Functional", type),
    ("keras.src.models.functional.Functional", "operations", property),
    ("keras.src.trainers.trainer", "BaseTrainer", type),
    ("keras.src.trainers.trainer", "Trainer", type),
    (FUNCTION, "Function", type),
    (f"{FUNCTION}.Function", "_run_functions_eagerly", property),
]


def built(make):
    """Returns an object's maker that runs it once with one batch."""

    def run():
        layer = make()
        layer(np.ones((2, 3, 4), "float32"))
        return layer

    return run


def dense():
    return keras.layers.Dense(4)


def functional():
    inputs = keras.Input((3, 4), name="given")
    return keras.Model(inputs, dense()(inputs))


def sequential():
    return keras.Sequential([keras.Input((3, 4)), dense()])


def compiled(optimizer="sgd", **settings):
    model = sequential()
    model.compile(optimizer, loss="mse", loss_weights=[0.5], **settings)
    return model


def with_metrics():
    return compiled(metrics=[keras.metrics.AUC()])


def optimizer():
    made = keras.optimizers.AdamW()
    made.exclude_from_weight_decay(var_names=["one"])
    made.build([keras.Variable([1.0], name="one")])
    return made


def averaging():
    made = keras.optimizers.SGD(use_ema=True)
    made.build([keras.Variable([1.0])])
    return made


def multi_optimizer():
    inner = keras.optimizers.SGD()
    made = keras.optimizers.MultiOptimizer(lambda variable: inner)
    made.build([keras.Variable([1.0], name="one")])
    return made


def attention(name="MultiHeadAttention"):
    layer = (
        keras.layers.GroupQueryAttention(4, 2, 1)
        if name == "GroupQueryAttention"
        else keras.layers.MultiHeadAttention(2, 4)
    )
    layer(*[np.ones((2, 3, 4), "float32")] * 2)
    return layer


# (what has it, how it is made, attribute, its type)
ATTRIBUTES = [
    ("a layer", built(dense), "_called", bool),
    ("a layer", built(dense), "_call_has_training_arg", bool),
    ("a layer", built(dense), "_dtype_policy", keras.DTypePolicy),
    ("a layer", built(dense), "_inbound_nodes", list),
    ("a layer", built(dense), "_layers", list),
    ("a layer", built(dense), "_non_trainable_variables", list),
    ("a layer", built(dense), "_parent_path", str),
    ("a layer", dense, "_parent_path", type(None)),
    ("a layer", built(dense), "_seed_generators", list),
    ("a layer", built(dense), "_losses", list),
    ("a layer", built(dense), "_metrics", list),
    ("a layer", built(dense), "_remat_mode", type(None)),
    ("a layer", built(dense), "_loss_ids", set),
    ("a layer", built(dense), "_trainable_variables", list),
    ("a layer", built(dense), "_build_shapes_dict", dict),
    ("a layer", dense, "_build_shapes_dict", type(None)),
    ("a Functional", functional, "_inputs", list),
    ("a Functional", functional, "_inputs_struct", keras.KerasTensor),
    ("a Sequential", sequential, "_functional", keras.Model),
    ("a symbol", lambda: keras.Input((4,)), "_dtype", str),
    ("a symbol", lambda: keras.Input((4,)), "_keras_history", tuple),
    ("an InputLayer", lambda: functional().layers[0], "_dtype", str),
    ("MultiHeadAttention", attention, "_dropout", float),
    ("MultiHeadAttention", attention, "_softmax", keras.layers.Softmax),
    (
        "GroupQueryAttention",
        lambda: attention("GroupQueryAttention"),
        "_return_attention_scores",
        bool,
    ),
    (
        "GroupQueryAttention",
        lambda: attention("GroupQueryAttention"),
        "_softmax",
        keras.layers.Softmax,
    ),
    ("a model", compiled, "_compile_config", object),
    ("a model", compiled, "_compile_metrics", type(None)),
    ("a model", with_metrics, "_compile_metrics", keras.Metric),
    ("a model", compiled, "_compile_loss", keras.Loss),
    ("a model", sequential, "_compile_loss", type(None)),
    (
        "metrics",
        lambda: with_metrics()._compile_metrics,
        "_user_metrics",
        list,
    ),
    (
        "metrics",
        lambda: with_metrics()._compile_metrics,
        "_user_weighted_metrics",
        type(None),
    ),
    ("a loss", lambda: compiled()._compile_loss, "_user_loss", str),
    ("a loss", lambda: compiled()._compile_loss, "_user_loss_weights", list),
    ("a loss", lambda: compiled()._compile_loss, "_flat_losses", type(None)),
    ("an optimizer", optimizer, "_distribution_strategy", object),
    ("an optimizer", optimizer, "_exclude_from_weight_decay", set),
    ("an optimizer", optimizer, "_exclude_from_weight_decay_cache", dict),
    ("an optimizer", averaging, "_model_variables_moving_average", list),
    ("an optimizer", optimizer, "_tracker", object),
    ("an optimizer", optimizer, "_trainable_variables", list),
    ("an optimizer", optimizer, "_trainable_variables_indices", dict),
    ("an optimizer", optimizer, "_variables", list),
    ("an optimizer", optimizer, "_weight_decay_by_var_key", dict),
    ("a MultiOptimizer", multi_optimizer, "_var_to_optimizer_idx", dict),
    ("a variable", lambda: keras.Variable([1.0]), "_dtype", str),
    ("a variable", lambda: keras.Variable([1.0]), "_path", str),
    ("a variable", lambda: keras.Variable([1.0]), "_trainable", bool),
    ("a variable", lambda: keras.Variable([1.0]), "_value", object),
    (
        "a tf.Variable",
        lambda: keras.Variable([1.0]).value,
        "_unique_id",
        str,
    ),
]

# Names that have a test of their own only, further down.
ELSEWHERE = {
    # `f"_{name}"`, the worker of an op: see the test of `_normalize`.
    "_*",
    "keras.src.ops._*",
    # A replica's copy of a variable: `test_get_returns_this_replicas_copy`.
    "_get",
    # TensorFlow's variables have none in Keras 3.12: read with a default, see
    # `test_the_layout_of_a_variable_places_another_beside_it`.
    "_layout",
    # `test_what_tensorflow_tracks_starts_with_self`.
    "_self_",
    # `test_a_constant_belongs_to_the_function_that_jax_compiles`.
    "_trace",
    # `test_a_class_of_activations_works_in_static_call`.
    "keras.src.activations.activations",
}


def contracts():
    """Returns every name that is in a contract."""
    rows = [(owner, name) for owner, name, _ in FUNCTIONS + CONSTANTS]
    modules = {owner for owner, _ in rows if is_module(owner)}
    inside = {f"{owner}.{name}" for owner, name in rows}
    plain = {name for _, name in rows} | {row[2] for row in ATTRIBUTES}
    return {*modules, *inside, *plain, *PACKAGES, *ELSEWHERE}


def is_module(owner):
    return re.fullmatch(r"[a-z0-9_.]+", owner) is not None


def find(owner):
    """Returns a module, or what is in one, by its dotted name."""
    parts, left = owner.split("."), []
    while parts:
        with contextlib.suppress(ModuleNotFoundError):
            found = importlib.import_module(".".join(parts))
            break
        left.insert(0, parts.pop())
    for name in left:
        found = getattr(found, name)
    return found


def skip_unless_here(name):
    """Skips what belongs to the other backend or to another Keras."""
    if name in TENSORFLOW_ONLY and BACKEND != "tensorflow":
        pytest.skip(f"{name} belongs to the TensorFlow backend")
    if not SINCE.get(name, KERAS) <= KERAS <= UNTIL.get(name, KERAS):
        pytest.skip(f"{name} is not in Keras {keras.__version__}")


def check_takes(function, expected):
    """Checks that a function takes arguments of these names, in this order."""
    parameters = list(inspect.signature(function).parameters.values())
    stars = {inspect.Parameter.VAR_POSITIONAL: "*"}
    stars[inspect.Parameter.VAR_KEYWORD] = "**"
    names = [stars.get(p.kind, "") + p.name for p in parameters]
    wanted = expected.split()
    assert names[: len(wanted)] == wanted, names
    required = [
        each.name
        for each in parameters[len(wanted) :]
        if each.default is each.empty and each.kind not in stars
    ]
    assert not required, f"new arguments without a default: {required}"


@pytest.mark.parametrize(
    ("owner", "attribute", "expected"),
    FUNCTIONS,
    ids=[f"{owner}.{name}" for owner, name, _ in FUNCTIONS],
)
def test_function_is_there_and_takes_these(owner, attribute, expected):
    skip_unless_here(attribute)
    pytest.importorskip(owner.partition(".")[0])
    check_takes(getattr(find(owner), attribute), expected)


def test_another_signature_is_found():
    check_takes(lambda x, mask, new=None, *more, **rest: None, "x mask")
    for other in (
        lambda x: None,
        lambda mask, x: None,
        lambda x, mask, new: None,
    ):
        with pytest.raises(AssertionError):
            check_takes(other, "x mask")


@pytest.mark.parametrize(
    ("owner", "attribute", "kind"),
    CONSTANTS,
    ids=[f"{owner}.{name}" for owner, name, _ in CONSTANTS],
)
def test_constant_is_there_and_of_this_type(owner, attribute, kind):
    skip_unless_here(attribute)
    assert isinstance(getattr(find(owner), attribute), kind)


@pytest.mark.parametrize(
    ("make", "attribute", "kind"),
    [row[1:] for row in ATTRIBUTES],
    ids=[
        f"{row[0]}-{row[2]}-{row[3].__name__}".replace(" ", "_")
        for row in ATTRIBUTES
    ],
)
def test_attribute_is_there_and_of_this_type(make, attribute, kind):
    skip_unless_here(attribute)
    assert isinstance(getattr(make(), attribute), kind)


@pytest.mark.parametrize("package", PACKAGES)
def test_package_is_there(package):
    assert inspect.ismodule(importlib.import_module(package))


def spy(monkeypatch, owner, name, log=None, result=None):
    """Notes the arguments of each call of an attribute, and passes it on.

    Past Keras's tracking, as tfmix does it, where the owner is an object.
    """
    calls = [] if log is None else log
    original = getattr(owner, name)

    def method(*args, **kwargs):
        calls.append((name, *args, *kwargs.values()))
        return original(*args, **kwargs) if result is None else result(*args)

    if inspect.ismodule(owner) or inspect.isclass(owner):
        monkeypatch.setattr(owner, name, method)
    else:
        monkeypatch.setitem(vars(owner), name, method)
    return calls


def common(name):
    return importlib.import_module(f"{COMMON}.{name}")


def batch(*shape, dtype="float32"):
    return keras.ops.ones(shape or (2, 3, 4), dtype)


# Layers


def test_a_layer_calls_check_super_called_before_it_casts_or_builds():
    layer = keras.layers.Dense(4)
    seen = []

    def hook():
        seen.append((layer._called, layer.built))
        layer.__dict__["_dtype_policy"] = keras.DTypePolicy("float16")

    layer.__dict__["_check_super_called"] = hook
    result = layer(batch())
    # Keras asks again in `build` and `add_weight`, while it is being built.
    assert seen[0] == (False, False)
    # The policy of the hook is the one the first call computes in.
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
    # Why tfmix goes past it.
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
    assert keras.layers.Dropout(0.5)._seed_generators
    assert not dense()._seed_generators


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
        # Put back, it is as if nothing had been assigned.
        scope.state_mapping = {}
        assert float(one.value[0]) == 1.0


def test_a_stateless_scope_collects_added_losses():
    layer = keras.layers.Dense(4, activity_regularizer="l2")
    layer(batch())
    with keras.StatelessScope(collect_losses=True) as scope:
        layer(batch())
        assert len(scope.losses) == 1


@tensorflow_only
def test_a_graph_of_its_own_takes_tensors_and_assigns_nothing():
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


# Graphs of layers


def test_a_symbol_knows_the_operation_and_the_node_that_made_it():
    start = keras.Input((3, 4))
    layer = dense()
    first, second = layer(start), layer(layer(start))
    operation, node, place = second._keras_history
    assert operation is second._keras_history.operation is layer
    assert (node, place) == (2, 0)
    assert layer._inbound_nodes[0].outputs[0] is first
    assert layer._inbound_nodes[0].input_tensors == [start]
    assert layer._inbound_nodes[node].outputs == [second]


def test_a_functional_model_casts_to_the_dtypes_of_its_symbols():
    seen = []

    class Layer(keras.layers.Layer):
        def call(self, inputs):
            seen.append(keras.backend.standardize_dtype(inputs.dtype))
            return inputs

    start = keras.Input((4,), dtype="float16")
    model = keras.Model(start, Layer(autocast=False)(start))
    seen.clear()
    model(batch(2, 4))
    (symbol,) = model._inputs
    symbol.__dict__["_dtype"] = "float32"
    model(batch(2, 4))
    assert seen == ["float16", "float32"]
    # The layer's is what a saved model says.
    layer = symbol._keras_history.operation
    assert layer.get_config()["dtype"] == "float16"
    layer.__dict__["_dtype"] = "float32"
    assert layer.get_config()["dtype"] == "float32"


def test_the_structure_of_the_inputs_is_what_the_model_is_called_with():
    inputs = {name: keras.Input((4,), name=name) for name in ("a", "b")}
    model = keras.Model(inputs, inputs["a"] + inputs["b"])
    assert set(model._inputs_struct) == {"a", "b"}
    assert model._inputs == list(inputs.values())
    assert getattr(sequential(), "_inputs_struct", None) is None


def test_a_sequential_model_calls_the_functional_inside_it(monkeypatch):
    model = sequential()
    assert not hasattr(keras.Sequential([dense()]), "_inputs")
    calls = spy(monkeypatch, model._functional, "call")
    model(batch())
    assert len(calls) == 1
    functional_class = find("keras.src.models.functional.Functional")
    assert type(model._functional) is functional_class
    assert model._functional.outputs == model.outputs


def test_structures_are_known_by_the_call_of_their_class():
    functional_class = find("keras.src.models.functional.Functional")
    assert type(functional()).call is functional_class.call
    assert type(sequential()).call is keras.Sequential.call
    assert "call" in vars(keras.Sequential)
    assert functional().operations[-1].name.startswith("dense")


# Ops


def replaced_op(monkeypatch, owner, name):
    """Lets a function of Keras return the constant 7 wherever it is called."""
    seven = keras.ops.full((2, 3, 4), 7.0)
    return spy(monkeypatch, owner, name, result=lambda *_: seven)


@pytest.mark.parametrize(
    ("theme", "name"),
    [
        ("numpy", "tanh"),
        ("nn", "gelu"),
        ("math", "erf"),
    ],
)
def test_an_op_looks_its_function_up_at_each_call(monkeypatch, theme, name):
    start = keras.Input((3, 4))
    op = getattr(keras.ops, name)
    model = keras.Model(start, op(start))
    module = getattr(op_places.BACKEND_OPS, theme)
    before = float(op(batch())[0, 0, 0])
    calls = replaced_op(monkeypatch, module, name)
    assert before != 7.0
    # Eagerly, and from the `Operation` in a graph.
    assert float(op(batch())[0, 0, 0]) == 7.0
    assert float(model(batch())[0, 0, 0]) == 7.0
    assert len(calls) == 2


def test_an_activation_and_a_layer_look_the_function_up_too(monkeypatch):
    layer = keras.layers.Activation("gelu")
    module = op_places.BACKEND_OPS.nn
    calls = replaced_op(monkeypatch, module, "gelu")
    keras.activations.gelu(batch())
    layer(batch())
    assert len(calls) == 2


def test_linear_algebra_is_reached_through_the_name_of_its_module(
    monkeypatch,
):
    class StandIn:
        @staticmethod
        def det(a):
            return "ours"

    monkeypatch.setattr(op_places.BACKEND_OPS, "linalg", StandIn)
    assert keras.ops.det(keras.ops.eye(2)) == "ours"


@pytest.mark.parametrize("theme", ["linalg", "numpy", "nn", "math", "image"])
def test_the_ops_of_a_theme_are_in_a_module_of_that_name(theme):
    for package in op_places.BACKEND_OPS, importlib.import_module(OPS):
        module = getattr(package, theme)
        assert inspect.ismodule(module)
        assert any(
            inspect.isfunction(value) and value.__module__ == module.__name__
            for value in vars(module).values()
        )


def test_a_composed_op_works_in_its_underscored_function(monkeypatch):
    start = keras.Input((3, 4))
    model = keras.Model(start, keras.ops.normalize(start))
    nn = importlib.import_module(OPS).nn
    check_takes(nn._normalize, "x axis order epsilon")
    calls = spy(monkeypatch, nn, "_normalize")
    keras.ops.normalize(batch())
    model(batch())
    assert len(calls) == 2


def test_a_class_of_activations_works_in_static_call(monkeypatch):
    module = importlib.import_module("keras.src.activations.activations")
    (found,) = (c for name, c in vars(module).items() if name == "Mish")
    raw = vars(found)["static_call"]
    assert isinstance(raw, staticmethod)
    calls = []

    def ours(x):
        calls.append(x)
        return raw.__func__(x)

    monkeypatch.setattr(found, "static_call", staticmethod(ours))
    keras.activations.mish(batch())
    keras.layers.Activation("mish")(batch())
    assert len(calls) == 2


ATTENTION_LAYERS = ["MultiHeadAttention", "GroupQueryAttention"]


@pytest.mark.parametrize("name", ATTENTION_LAYERS)
def test_attention_without_scores_calls_the_op(monkeypatch, name):
    layer = attention(name)
    module = op_places.BACKEND_OPS.nn
    calls = spy(monkeypatch, module, "dot_product_attention")
    layer(batch(), batch())
    assert len(calls) == 1


@pytest.mark.parametrize("name", ATTENTION_LAYERS)
def test_attention_with_scores_calls_compute_attention(monkeypatch, name):
    layer = attention(name)
    module = op_places.BACKEND_OPS.nn
    op = spy(monkeypatch, module, "dot_product_attention")
    methods = spy(monkeypatch, type(layer), "_compute_attention")
    softmaxes = spy(monkeypatch, layer._softmax, "call")
    layer(batch(), batch(), return_attention_scores=True)
    assert len(methods) == len(softmaxes) == 1
    assert not op
    # Its first argument is the layer, which knows what was asked for.
    assert methods[0][1] is layer
    if name == "GroupQueryAttention":
        assert layer._return_attention_scores is True


@pytest.mark.parametrize("name", ATTENTION_LAYERS)
def test_attention_with_dropout_does_not_call_the_op(monkeypatch, name):
    layer = attention(name)
    module = op_places.BACKEND_OPS.nn
    op = spy(monkeypatch, module, "dot_product_attention")
    dropout = "_dropout" if hasattr(layer, "_dropout") else "dropout"
    monkeypatch.setitem(vars(layer), dropout, 0.5)
    layer(batch(), batch())
    assert not op


# Keras's own policy


def test_keras_reads_and_writes_its_policy_through_two_functions(monkeypatch):
    state = common("global_state")
    reads = spy(monkeypatch, state, "get_global_attribute")
    writes = spy(monkeypatch, state, "set_global_attribute")
    keras.config.set_dtype_policy("mixed_float16")
    assert [call[1] for call in writes] == ["dtype_policy"]
    assert writes[0][2].name == "mixed_float16"
    reads.clear()
    assert dense().compute_dtype == "float16"
    assert "dtype_policy" in [call[1] for call in reads]
    reads.clear()
    assert keras.config.dtype_policy().name == "mixed_float16"
    assert [call[1] for call in reads] == ["dtype_policy"]


def test_the_tracker_of_this_thread_holds_keras_own_policy():
    state, others = common("global_state"), []
    keras.config.set_dtype_policy("mixed_bfloat16")
    assert state.GLOBAL_STATE_TRACKER.dtype_policy.name == "mixed_bfloat16"
    state.GLOBAL_STATE_TRACKER.dtype_policy = keras.DTypePolicy("float16")
    assert keras.config.dtype_policy().name == "float16"
    thread = threading.Thread(
        target=lambda: others.append(
            getattr(state.GLOBAL_STATE_TRACKER, "dtype_policy", None)
        )
    )
    thread.start()
    thread.join()
    assert others == [None]


def test_clear_session_starts_another_tracker():
    state = common("global_state")
    keras.config.set_dtype_policy("mixed_bfloat16")
    before = state.GLOBAL_STATE_TRACKER
    keras.utils.clear_session(free_memory=False)
    assert state.GLOBAL_STATE_TRACKER is not before
    assert getattr(state.GLOBAL_STATE_TRACKER, "dtype_policy", None) is None


# Training


def data():
    return np.ones((2, 3, 4), "float32"), np.zeros((2, 3, 4), "float32")


@pytest.mark.parametrize("jit", [True, False])
def test_fit_scales_the_loss_and_then_applies_the_gradients(monkeypatch, jit):
    # TensorFlow's step keeps its state in variables, JAX's hands it on.
    apply = {"tensorflow": "apply_gradients", "jax": "stateless_apply"}
    model, calls = compiled(jit_compile=jit), []
    for name in ("scale_loss", apply[BACKEND], "apply"):
        spy(monkeypatch, model.optimizer, name, calls)
    model.fit(*data(), verbose=0)
    assert [c[0] for c in calls] == ["scale_loss", apply[BACKEND], "apply"]


def test_fit_takes_the_methods_of_the_one_model(monkeypatch):
    # Where tfmix puts its wrappers: on the model, not on its class.
    model, calls = compiled(), []
    names = ["compute_loss", "_compute_loss", "compute_metrics"]
    step = {"tensorflow": "train_step", "jax": "compute_loss_and_updates"}
    for name in [step[BACKEND], *names]:
        spy(monkeypatch, model, name, calls)
    model.fit(*data(), verbose=0)
    order = list(dict.fromkeys(call[0] for call in calls))
    # Before the step, Keras builds the loss and the metrics with shapes.
    assert set(order) == {step[BACKEND], *names}
    start = [c[0] for c in calls].index(step[BACKEND])
    assert [c[0] for c in calls[start:]] == [
        step[BACKEND],
        "_compute_loss",
        "compute_loss",
        "compute_metrics",
    ]


def test_compute_loss_of_a_model_takes_what_its_step_passes():
    model = compiled()
    x, y = data()
    loss = model._compute_loss(
        x=x, y=y, y_pred=model(x), sample_weight=None, training=True
    )
    assert np.shape(loss) == ()


def test_a_compiled_loss_is_called_with_labels_and_results(monkeypatch):
    model, calls = compiled(), []
    original = model._compile_loss
    vars(model)["_compile_loss"] = lambda *given: calls.append(given) or 1.0
    x, y = data()
    model.compute_loss(x=x, y=y, y_pred=x, sample_weight=None)
    assert len(calls) == 1
    assert calls[0][0] is y
    assert calls[0][1] is x
    assert calls[0][2] is None
    compile_loss = find("keras.src.trainers.compile_utils.CompileLoss")
    assert type(original) is compile_loss
    assert original._user_loss == "mse"
    assert list(original._user_loss_weights) == [0.5]


def test_a_loss_of_the_same_settings_gives_the_same_loss():
    compile_loss = find("keras.src.trainers.compile_utils.CompileLoss")
    x, y = data()
    loss = compile_loss(loss="mse", loss_weights=[0.5])
    assert float(loss(y, x)) == float(compiled()._compile_loss(y, x)) == 0.5


def test_a_built_loss_knows_each_output_by_its_path():
    compile_loss = find("keras.src.trainers.compile_utils.CompileLoss")
    made = compile_loss(loss={"b": "mse", "a": "mae"}, output_names=["b", "a"])
    assert made.output_names == ["b", "a"]
    outputs = [keras.KerasTensor((4, 2)), keras.KerasTensor((4, 3))]
    made.build(outputs, outputs)
    found = [(one.path, one.loss.name) for one in made._flat_losses]
    assert found == [((0,), "mse"), ((1,), "mae")]


def test_added_losses_are_aggregated_before_the_sum(monkeypatch):
    model = keras.Sequential([keras.layers.Dense(4, kernel_regularizer="l2")])
    model.compile("sgd", loss="mse")
    trainer = find(TRAINER)
    calls = spy(monkeypatch, trainer, "_aggregate_additional_loss")
    x, y = data()
    y_pred = model(x)
    model.compute_loss(x=x, y=y, y_pred=y_pred)
    assert len(calls) == 1
    assert calls[0][1] is model
    assert float(calls[0][2]) > 0.0


def test_models_are_trainers():
    trainer = find(TRAINER)
    assert issubclass(keras.Model, trainer)
    assert {"compile", "fit", "_aggregate_additional_loss"} <= {*vars(trainer)}


def test_metrics_of_compile_are_known_before_they_are_built():
    model = with_metrics()
    (given,) = model._compile_metrics._user_metrics
    assert not model._compile_metrics.built
    assert given not in model.metrics
    assert given in training.metrics(model)
    x = np.ones((2, 3, 4))
    model.fit(x, 0.0 * model.predict(x, verbose=0), verbose=0)
    assert model._compile_metrics.built
    assert training.metrics(model) == model.metrics


def test_the_compile_config_is_what_a_model_saves_of_compile():
    model = compiled()
    assert model._compile_config.config["loss"] == "mse"
    model._compile_config.config["loss"] = "mae"
    assert model.get_compile_config()["loss"] == "mae"
    assert not hasattr(sequential(), "_compile_config")


def test_safe_mode_is_what_the_scope_says():
    def config():
        layer = keras.layers.Lambda(lambda x: x)
        return keras.saving.serialize_keras_object(layer)

    scope = find("keras.src.saving.serialization_lib.SafeModeScope")
    load = keras.saving.deserialize_keras_object
    with scope(False):
        assert isinstance(load(config(), safe_mode=None), keras.Layer)
    with scope(True), pytest.raises(ValueError, match="[Ll]ambda"):
        load(config(), safe_mode=None)


def test_keras_classes_are_in_modules_of_its_name():
    # How tfmix tells Keras's own layers and regularizers from a user's.
    assert keras.layers.Dense.__module__.startswith("keras.src.")
    assert keras.regularizers.L2.__module__.startswith("keras.src.")
    assert inspect.isfunction(vars(keras.regularizers.L2)["__call__"])


# Optimizers


def ready(make=keras.optimizers.SGD, **settings):
    """Returns an optimizer that is built on two variables, and these."""
    made = make(0.1, **settings)
    variables = [keras.Variable([1.0], name=name) for name in ("one", "two")]
    made.build(variables)
    return made, variables


def ones():
    return [keras.ops.ones((1,)), keras.ops.ones((1,))]


def test_the_key_of_a_variable_takes_nothing_of_the_optimizer():
    made, (variable, _) = ready()
    key = keras.optimizers.Optimizer._var_key(None, variable)
    assert key == made._var_key(variable)
    wanted = variable.value._unique_id if BACKEND == "tensorflow" else None
    assert key == (wanted or id(variable))


def test_the_variables_are_those_of_the_build_in_its_order():
    made, variables = ready()
    assert made._trainable_variables == variables
    keys = [made._var_key(variable) for variable in variables]
    assert made._trainable_variables_indices == dict(
        zip(keys, range(2), strict=True)
    )
    assert [made._get_variable_index(v) for v in variables] == [0, 1]


def test_the_index_of_a_variable_is_that_of_the_dictionary():
    made, (one, two) = ready()
    vars(made)["_trainable_variables_indices"] = {made._var_key(two): 5}
    assert made._get_variable_index(two) == 5
    with pytest.raises(KeyError):
        made._get_variable_index(one)


def test_a_variable_of_no_build_is_refused():
    made, variables = ready()
    made._check_variables_are_known(variables)
    with pytest.raises(ValueError, match="[Uu]nknown variable"):
        made._check_variables_are_known([keras.Variable([1.0])])


def test_all_variables_are_in_one_list_of_which_a_copy_is_public():
    made, _ = ready(momentum=0.9)
    assert made._variables == made.variables
    assert made._variables is not made.variables
    names = [each.name for each in made._variables]
    assert names[:2] == ["iteration", "learning_rate"]
    assert [name for name in names if name.endswith("momentum")] == names[2:]
    assert len(names) == 4


def test_the_tracker_adds_only_variables_it_does_not_know():
    made, _ = ready()
    before = len(made._variables)
    known, unknown = keras.Variable([1.0]), keras.Variable([1.0])
    made._tracker.stored_ids["variables"].add(id(known))
    made.known, made.unknown = known, unknown
    assert len(made._variables) == before + 1
    assert made._variables[-1] is unknown


def test_apply_checks_the_variables_and_asks_which_to_overwrite(monkeypatch):
    made, variables = ready()
    calls = []
    for name in (
        "_check_variables_are_known",
        "_overwrite_variable_with_gradient",
    ):
        spy(monkeypatch, made, name, calls)
    made.apply(ones(), variables)
    assert calls[0][0] == "_check_variables_are_known"
    asked = [c[1] for c in calls if c[0].startswith("_overwrite")]
    assert {id(each) for each in asked} == {id(each) for each in variables}


def test_a_variable_that_is_overwritten_gets_its_gradient(monkeypatch):
    made, (one, two) = ready()
    monkeypatch.setitem(
        vars(made),
        "_overwrite_variable_with_gradient",
        lambda variable: variable is one,
    )
    made.apply([keras.ops.full((1,), 7.0)] * 2, [one, two])
    assert float(one.value[0]) == 7.0
    assert float(two.value[0]) == pytest.approx(0.3)


def test_an_attribute_of_a_variable_says_that_it_is_overwritten():
    made, (one, _) = ready()
    assert not made._overwrite_variable_with_gradient(one)
    one.overwrite_with_gradient = True
    assert made._overwrite_variable_with_gradient(one)


def test_weight_decay_asks_for_each_variable(monkeypatch):
    made, variables = ready(weight_decay=0.5)
    calls = spy(monkeypatch, made, "_use_weight_decay")
    made.apply(ones(), variables)
    assert len(calls) == 2


def test_weight_decay_is_decided_by_a_set_of_keys_and_noted_at_the_build():
    skip_unless_here("_weight_decay_by_var_key")
    made = keras.optimizers.SGD(0.1, weight_decay=0.5)
    one, two = (keras.Variable([1.0], name=name) for name in ("one", "two"))
    made.exclude_from_weight_decay(var_list=[one])
    keys = made._var_key(one), made._var_key(two)
    assert made._exclude_from_weight_decay == {keys[0]}
    excluded = [made._is_excluded_from_weight_decay(v) for v in (one, two)]
    assert excluded == [True, False]
    made.build([one, two])
    assert made._weight_decay_by_var_key == {keys[0]: False, keys[1]: True}
    vars(made)["_weight_decay_by_var_key"][keys[0]] = True
    assert made._use_weight_decay(one)


def test_weight_decay_is_decided_by_the_set_of_keys_and_its_cache():
    skip_unless_here("_exclude_from_weight_decay_cache")
    made, (one, two) = ready(weight_decay=0.5)
    made.built = False
    made.exclude_from_weight_decay(var_list=[one])
    made.built = True
    assert made._exclude_from_weight_decay == {made._var_key(one)}
    assert [made._use_weight_decay(v) for v in (one, two)] == [False, True]
    assert made._exclude_from_weight_decay_cache == {
        made._var_key(one): False,
        made._var_key(two): True,
    }
    # Another set counts once the cache is empty.
    vars(made)["_exclude_from_weight_decay"] = {made._var_key(two)}
    assert not made._use_weight_decay(one)
    vars(made)["_exclude_from_weight_decay_cache"] = {}
    assert [made._use_weight_decay(v) for v in (one, two)] == [True, False]


def test_a_multi_optimizer_finds_the_optimizer_of_a_variable_by_its_key():
    skip_unless_here("_var_to_optimizer_idx")
    inner = [keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.2)]
    made = keras.optimizers.MultiOptimizer(
        lambda variable: inner[variable.name == "two"]
    )
    variables = [keras.Variable([1.0], name=name) for name in ("one", "two")]
    made.build(variables)
    assert made.optimizers == inner
    assert made._var_to_optimizer_idx == {
        made._var_key(each): index for index, each in enumerate(variables)
    }
    # The other optimizer does not know the variable: it was asked.
    vars(made)["_var_to_optimizer_idx"].clear()
    swapped = zip(map(made._var_key, variables), (1, 0), strict=True)
    vars(made)["_var_to_optimizer_idx"].update(dict(swapped))
    with pytest.raises(ValueError, match="[Uu]nknown variable"):
        made.apply(ones(), variables)


@tensorflow_only
def test_apply_sums_the_gradients_over_the_replicas_once():
    made, variables = ready()
    calls = []

    def double(pairs):
        calls.append(pairs)
        return [(2.0 * gradient, variable) for gradient, variable in pairs]

    vars(made)["_all_reduce_sum_gradients"] = double
    made.apply(ones(), variables)
    assert len(calls) == 1
    assert [pair[1] for pair in calls[0]] == [v.value for v in variables]
    # What it returns is applied.
    assert float(variables[0].value[0]) == pytest.approx(0.8)


@tensorflow_only
def test_list_may_stand_for_the_sum_over_the_replicas():
    made, variables = ready()
    vars(made)["_all_reduce_sum_gradients"] = list
    made.apply(ones(), variables)
    assert float(variables[0].value[0]) == pytest.approx(0.9)


@tensorflow_only
def test_apply_updates_through_the_strategy_of_the_optimizer():
    import tensorflow as tf

    made, variables = ready()
    assert made._distribution_strategy is tf.distribute.get_strategy()
    updated = []

    class Extended:
        def update(self, variable, function, args=(), group=True):
            updated.append(variable)
            return function(variable, *args)

    class Strategy:
        extended = Extended()

    vars(made)["_distribution_strategy"] = Strategy()
    made.apply(ones(), variables)
    assert [id(each) for each in updated] == [id(v.value) for v in variables]


@tensorflow_only
def test_slots_are_placed_by_the_strategy_of_the_optimizer():
    made, (one, _) = ready()
    beside = []

    class Extended:
        def colocate_vars_with(self, variable):
            beside.append(variable)
            return contextlib.nullcontext()

    class Strategy:
        extended = Extended()

    vars(made)["_distribution_strategy"] = Strategy()
    made.add_variable_from_reference(one, name="slot")
    assert beside == [one.value]


# Variables


def test_value_wraps_what_the_attribute_holds():
    variable, other = keras.Variable([1.0]), keras.Variable([2.0])
    assert vars(variable)["_value"] is variable._value
    assert variable.value is variable._value
    vars(variable)["_value"] = other._value
    assert float(variable.value[0]) == 2.0
    variable.assign([3.0])
    shared = BACKEND == "tensorflow"
    assert float(other.value[0]) == (3.0 if shared else 2.0)


def test_the_dtype_and_the_path_are_attributes_of_a_variable():
    variable = keras.Variable([1.0], name="one")
    variable._dtype, variable._path = "bfloat16", "somewhere/one"
    assert variable.dtype == "bfloat16"
    assert variable.path == "somewhere/one"
    assert variable.name == "one"


def test_a_variable_is_what_its_dictionary_holds():
    variable = keras.Variable([1.0], name="one", trainable=False)
    copy = object.__new__(keras.Variable)
    for name, value in vars(variable).items():
        if not name.startswith("_self_"):
            vars(copy)[name] = value
    for name in ("name", "path", "shape", "dtype", "trainable", "aggregation"):
        assert getattr(copy, name) == getattr(variable, name)
    assert copy.value is variable.value


def test_initialize_stores_a_value_in_the_dtype_that_is_set():
    variable = keras.Variable([1.5])
    before = variable._value
    variable._dtype = "float16"
    variable._initialize(keras.ops.cast(before, "float16"))
    assert variable._value is not before
    stored = keras.backend.standardize_dtype(variable._value.dtype)
    assert stored == variable.dtype == "float16"
    assert float(variable.value[0]) == 1.5


def test_trainable_is_what_a_new_storage_is_created_with():
    variable = keras.Variable([1.5])
    variable._trainable = False
    assert not variable.trainable
    variable._initialize(keras.ops.ones((1,)))
    variable._trainable = True
    assert variable.trainable
    if BACKEND == "tensorflow":
        assert not variable._value.trainable


def test_a_layer_trainable_or_not_leaves_the_storage_as_it_is():
    layer = built(dense)()
    layer.trainable = False
    assert not layer.kernel._trainable
    if BACKEND == "tensorflow":
        assert layer.kernel._value.trainable


def test_a_variable_without_a_distribution_has_no_layout():
    assert getattr(keras.Variable([1.0]), "_layout", None) is None


@jax_only
def test_a_constant_belongs_to_the_function_that_jax_compiles():
    import jax

    found = []

    def inner(x):
        found.append(jax.numpy.zeros(())._trace)
        return x * 2.0

    @jax.jit
    def outer(x):
        # Kept alive: equal addresses would say nothing.
        found.append(jax.numpy.zeros(())._trace)
        return jax.grad(inner)(x) + jax.vmap(inner)(x[None])[0] + outer_too(x)

    outer_too = jax.jit(inner)
    outer(jax.numpy.ones(()))
    around, differentiated, mapped, compiled = found
    assert around is differentiated is mapped
    assert compiled is not around
    jax.grad(lambda x: found.append(jax.numpy.zeros(())) or x)(1.0)
    assert not isinstance(found[-1], jax.core.Tracer)


@jax_only
def test_the_layout_of_a_variable_places_another_beside_it():
    # Its type is one thing in Keras 3.12, another in 3.15; it is passed on.
    devices = keras.distribution.list_devices("cpu")[:2]
    mesh = keras.distribution.DeviceMesh((2,), ["model"], devices)
    layouts = keras.distribution.LayoutMap(mesh)
    layouts[".*split"] = ("model", None)
    made, _ = ready()
    distribution = keras.distribution.ModelParallel(layout_map=layouts)
    with distribution.scope():
        one = keras.Variable(np.ones((4, 3)), name="split")
    slot = made.add_variable(
        one.shape, layout=one._layout, aggregation=one.aggregation
    )
    assert len(one.value.sharding.device_set) == 2
    assert not one.value.sharding.is_fully_replicated
    assert slot.value.sharding.is_equivalent_to(one.value.sharding, 2)


@tensorflow_only
def test_the_key_of_a_variable_is_the_unique_id_of_what_value_is():
    class View(keras.Variable):
        @property
        def value(self):
            return self

        @property
        def _unique_id(self):
            return "ours"

    made, (one, two) = ready()
    assert one.value._unique_id != two.value._unique_id
    view = object.__new__(View)
    vars(view).update(vars(one))
    assert made._var_key(view) == "ours"


@tensorflow_only
def test_get_returns_this_replicas_copy():
    import tensorflow as tf

    strategy = helpers.mirrored_strategy()
    with strategy.scope():
        variable = keras.Variable([1.0])
    assert isinstance(variable._value, tf.distribute.DistributedValues)
    copies = []
    strategy.run(lambda: copies.append(variable._value._get()))
    assert len(copies) == 2
    assert not any(
        isinstance(each, tf.distribute.DistributedValues) for each in copies
    )
    assert len({id(each) for each in copies}) == 2
    plain = keras.Variable([1.0]).value
    assert not isinstance(plain, tf.distribute.DistributedValues)


@tensorflow_only
def test_what_tensorflow_tracks_starts_with_self(tmp_path):
    import tensorflow as tf

    variable = keras.Variable([1.0])
    before = set(vars(variable))
    tf.train.Checkpoint(one=variable).write(str(tmp_path / "saved"))
    new = set(vars(variable)) - before
    assert new
    assert all(name.startswith("_self_") for name in new)


@tensorflow_only
@pytest.mark.parametrize("tensors", [{}, {"part": 3.0}], ids=["none", "one"])
def test_a_checkpoint_asks_a_variable_for_its_tensors(tmp_path, tensors):
    import tensorflow as tf

    calls = []

    class Own(keras.Variable):
        def _serialize_to_tensors(self):
            calls.append("save")
            return {k: tf.constant(v) for k, v in tensors.items()}

        def _restore_from_tensors(self, restored_tensors):
            calls.append({k: float(v) for k, v in restored_tensors.items()})

    # With another variable beside it, or there may be nothing to write.
    checkpoint = tf.train.Checkpoint(one=Own([1.0]), two=tf.Variable(2.0))
    path = checkpoint.write(str(tmp_path / "saved"))
    assert calls == ["save"]
    checkpoint.read(path).assert_existing_objects_matched()
    given = [call for call in calls if call != "save"]
    # What saved nothing is not asked to restore.
    assert given == ([tensors] if tensors else [])


# How TensorFlow traces


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
    # In the function itself, and in a branch, by way of the outer graph.
    assert found == [jit, jit]


@tensorflow_only
def test_the_optimization_barrier_returns_a_list_of_what_it_was_given():
    import tensorflow as tf

    barrier = importlib.import_module(XLA).xla_optimization_barrier

    @tf.function(jit_compile=True)
    def through(x):
        (result,) = barrier([x])
        return result

    assert float(through(tf.constant(3.0))) == 3.0


@tensorflow_only
def test_a_reduction_by_a_function_of_ours_leaves_the_other_axes():
    import tensorflow as tf

    @tf.function(jit_compile=True)
    def joined(words):
        either = tf.function(tf.bitwise.bitwise_or)
        reducer = either.get_concrete_function(
            *[tf.TensorSpec((), "int32")] * 2
        )
        return importlib.import_module(XLA).xla_reduce(words, 0, [1], reducer)

    assert joined(tf.constant([[1, 4], [2, 2]])).numpy().tolist() == [5, 2]


@tensorflow_only
def test_a_reduction_of_several_tensors_adds_up_each():
    import tensorflow as tf

    @tf.function(jit_compile=True)
    def sums(*words):
        added = tf.function(lambda a, b, c, d: (a + c, b + d))
        scalars = [tf.TensorSpec((), "int32")] * 4
        reducer = added.get_concrete_function(*scalars)
        reduce = importlib.import_module(XLA).xla_variadic_reduce_v2
        return reduce(list(words), [0, 0], [0], reducer)

    found = sums(tf.constant([1, 4]), tf.constant([2, 2]))
    assert [int(one) for one in found] == [5, 4]


@tensorflow_only
def test_what_reads_a_variable_is_told_from_what_writes_it():
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
    # A function that is traced apart takes the handle and is a user itself.
    inner = tf.function(lambda: variable.assign([3.0, 4.0]))
    assert kinds(inner) - {"ReadVariableOp"}


@tensorflow_only
def test_a_function_asks_its_class_at_each_call_whether_to_run_eagerly(
    monkeypatch,
):
    import tensorflow as tf

    runs = []
    function = tf.function(lambda: runs.append(1), autograph=False)
    function()
    function()
    assert len(runs) == 1
    function_class = find(f"{FUNCTION}.Function")
    assert type(function) is function_class
    original = vars(function_class)["_run_functions_eagerly"]
    assert original.__get__(function, type(function)) is False
    monkeypatch.setattr(
        function_class, "_run_functions_eagerly", property(lambda _: True)
    )
    function()
    function()
    assert len(runs) == 3


@tensorflow_only
def test_tapes_accumulators_and_branches_are_known_where_they_are():
    import tensorflow as tf

    from tfmix._keras import compilation

    seen = {}

    def look(where):
        seen[where] = (
            compilation.is_recorded(),
            compilation.runs_forward(),
            compilation.in_branch(),
        )
        return tf.constant(0.0)

    look("alone")
    with tf.GradientTape():
        look("tape")
    x = tf.constant(1.0)
    with tf.autodiff.ForwardAccumulator(x, x):
        look("accumulator")
    branch = tf.function(
        lambda p: tf.cond(p, lambda: look("branch"), lambda: 0.0),
        autograph=False,
    )
    branch(tf.constant(True))
    assert seen == {
        "alone": (False, False, False),
        "tape": (True, False, False),
        "accumulator": (True, True, False),
        "branch": (False, False, True),
    }


def test_a_layer_run_as_an_earlier_call_is_in_its_mode_and_dtype():
    from tfmix._keras import layers

    seen, states = [], []

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
    outer(batch(), training=True)
    seen.clear()
    with layers.as_called(states[-1]):
        outer.inner(batch())
        dtype = keras.backend.standardize_dtype(outer.weight.value.dtype)
        assert dtype == "float16"
    outer.inner(batch())
    assert seen == [True, None]


# That no name is left out


def names_of(folder):
    """Maps the private names in a folder's files to the files they are in."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        for name in private_names.private_names(source):
            found.setdefault(name, []).append(path.name)
    return found


def check_all_are_in_a_contract(folder):
    found = names_of(folder)
    left_out = {n: found[n] for n in sorted(set(found) - contracts())}
    assert not left_out, f"private names without a contract: {left_out}"


def check_no_private_module(folder, allowed):
    found = {
        path.relative_to(folder).as_posix(): sorted(mentioned)
        for path in sorted(folder.rglob("*.py"))
        if path.relative_to(folder).parts[0] != allowed
        and (
            mentioned := private_names.mentions(
                path.read_text(encoding="utf-8")
            )
        )
    }
    assert not found, f"private modules outside of {allowed}/: {found}"


def test_each_private_name_is_in_a_contract():
    assert len(names_of(OURS / "_keras")) > 50
    check_all_are_in_a_contract(OURS / "_keras")


def check_each_contract_is_needed(folder):
    found = set(names_of(folder))
    for path in folder.glob("*.py"):
        # What has no underscore is known by its word.
        found |= set(re.findall(r"\w+", path.read_text(encoding="utf-8")))
    rows = {row[1] for row in FUNCTIONS + CONSTANTS}
    rows |= {row[2] for row in ATTRIBUTES}
    rows |= {name for name in ELSEWHERE if name != "_*"}
    assert not rows - found, f"nothing needs these: {sorted(rows - found)}"


def test_each_contract_is_of_a_name_that_is_used():
    check_each_contract_is_needed(OURS / "_keras")


def test_a_contract_that_nothing_needs_is_found(tmp_path):
    for path in (OURS / "_keras").glob("*.py"):
        source = path.read_text(encoding="utf-8")
        source = source.replace("_parent_path", "name")
        (tmp_path / path.name).write_text(source)
    with pytest.raises(AssertionError, match=r"these: \['_parent_path'\]"):
        check_each_contract_is_needed(tmp_path)


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("layer._secret", "_secret"),
        ("layer._secret = 1", "_secret"),
        ("layer._secret()", "_secret"),
        ("vars(layer)['_secret']", "_secret"),
        ("getattr(layer, '_secret', None)", "_secret"),
        ("NAMES = ('_secret',)", "_secret"),
        ("BASE = '_secret'\nlayer[f'{BASE}_cache']", "_secret_cache"),
        ("layer[f'_{name}_cache']", "_*_cache"),
        ("class View(keras.Variable):\n    _x = self._secret", "_secret"),
        (
            "class View(keras.Variable):\n    def _secret(self):\n        pass",
            "_secret",
        ),
        ("import keras.src.secret", "keras.src.secret"),
        ("from keras.src import secret", "keras.src.secret"),
        ("keras.src.secret.call()", "keras.src.secret"),
        ("from tensorflow.python import secret", "tensorflow.python.secret"),
        (
            "from tensorflow.compiler import secret",
            "tensorflow.compiler.secret",
        ),
        ("import_module('keras.src.secret')", "keras.src.secret"),
        (
            "def get():\n"
            "    m = importlib.import_module('keras.src.backend')\n"
            "    return m.secret",
            "keras.src.backend.secret",
        ),
        (
            "def get(name):\n"
            "    return importlib.import_module(f'keras.src.{name}')\n"
            "get('ops').secret",
            "keras.src.ops.secret",
        ),
        (
            "def get():\n"
            "    return importlib.import_module('keras.src.ops')\n"
            "place = get(), 'secret'",
            "keras.src.ops.secret",
        ),
    ],
)
def test_an_injected_name_is_found(tmp_path, code, name):
    path = tmp_path / "ours.py"
    path.write_text(f"{code}\n")
    with pytest.raises(AssertionError, match=re.escape(repr(name))):
        check_all_are_in_a_contract(tmp_path)


def test_names_of_our_own_are_no_private_names(tmp_path):
    (tmp_path / "ours.py").write_text(
        '"""About `keras.src.secret`.\n\n_secret\n"""\n'
        "from tfmix import _formats\n"
        "class Ours:\n"
        "    def _method(self):\n"
        "        # keras.src.secret and _secret\n"
        "        return self._mine, _formats._SIZES, self.__class__\n"
        "getattr(model, '_tfmix_methods')\n"
        "model._tfmix_methods = None\n"
        "name.startswith('_')\n"
    )
    assert names_of(tmp_path) == {}


def test_only_the_private_side_names_private_modules():
    assert len(list(OURS.rglob("*.py"))) > 50
    check_no_private_module(OURS, "_keras")


@pytest.mark.parametrize(
    "code",
    [
        "import keras.src",
        "def late():\n    from keras.src.backend import common",
        "import tensorflow.python.eager.context as context",
        "from tensorflow.compiler import xla",
        "keras.src.ops",
        "importlib.import_module('keras.src.ops')",
        "importlib.import_module(f'keras.src.{name}')",
    ],
)
def test_a_private_module_elsewhere_is_found(tmp_path, code):
    for name in ("_keras", "policy"):
        (tmp_path / name).mkdir()
    (tmp_path / "_keras" / "allowed.py").write_text(f"{code}\n")
    prose = '"""Of `keras.src`."""\n# tensorflow.python\n'
    (tmp_path / "policy" / "scope.py").write_text(prose)
    check_no_private_module(tmp_path, "_keras")
    (tmp_path / "policy" / "scope.py").write_text(f"{prose}{code}\n")
    with pytest.raises(AssertionError, match=r"policy/scope\.py"):
        check_no_private_module(tmp_path, "_keras")


def test_the_symbolic_build_makes_losses_metrics_and_optimizer():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile("adam", loss="mse", metrics=["mae"])
    before = len(model.metrics_variables)
    data = keras.KerasTensor((8, 4)), keras.KerasTensor((8, 2))
    model._symbolic_build(data_batch=data)
    assert len(model.metrics_variables) > before
    assert model.optimizer.built
