"""The private names of Keras and TensorFlow that tfmix uses, one by one.

Each name that `tfmix/_keras/` reaches into is in one of the tables: it exists,
and takes these arguments (`test_contract_names.py`). The other contract tests
check what a name means where a change of it would be silent: no other test
would fail. A version of Keras without a name fails here, which names it.
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
from keras.src.saving.serialization_lib import SerializableDict

import tfmix
from tests import helpers

OURS = pathlib.Path(tfmix.__file__).parent
BACKEND = keras.backend.backend()
KERAS = tuple(int(part) for part in keras.__version__.split(".")[:2])
COMMON = "keras.src.backend.common"
OPS = "keras.src.ops"
TRACKABLE = "tensorflow.__internal__.tracking.AutoTrackable"
XLA = "tensorflow.compiler.tf2xla.ops.gen_xla_ops"

tensorflow_only = helpers.requires_backend("tensorflow")
jax_only = helpers.requires_backend("jax")

# These names belong to one backend, or to some versions of Keras.
TENSORFLOW_ONLY = set(
    """
    _maybe_symbolic_build _all_reduce_sum_gradients _deferred_dependencies
    _distribution_strategy _export_to_saved_model_graph
    _get_control_flow_context _lookup_dependency _restore_from_tensors
    _serialize_to_tensors _tape _trackable_children
    _unconditional_dependency_names _unique_id _write_object_proto
    capture could_possibly_record pack_tangents should_record_backprop
    xla_dot_v2 xla_optimization_barrier xla_variadic_reduce_v2
    """.split()
)
SINCE = {
    "BaseTrainer": (3, 16),
    "_is_excluded_from_weight_decay": (3, 16),
    "ops": (3, 16),
}
UNTIL = {"Trainer": (3, 15)}
TRAINER = "keras.src.trainers.trainer." + (
    "BaseTrainer" if KERAS >= SINCE["BaseTrainer"] else "Trainer"
)

# Keras 3.16 moved it one level deeper.
CORE_OWNER = "keras.src.backend" + (".ops" if KERAS >= SINCE["ops"] else "")

# These are only named as places to search.
PACKAGES = (
    "keras.src",
    "keras.src.backend",
    "keras.src.backend.jax.trainer",
    "keras.src.layers",
    OPS,
)

# Maps owners to functions and their arguments; further ones have defaults.
FUNCTIONS = {
    f"{COMMON}.global_state": {
        "get_global_attribute": "name default",
        "set_global_attribute": "name value",
    },
    f"{COMMON}.masking": {
        "get_keras_mask": "x",
        "set_keras_mask": "x mask",
    },
    f"{COMMON}.name_scope": {"current_path": ""},
    f"{COMMON}.stateless_scope": {"get_stateless_scope": ""},
    f"{COMMON}.symbolic_scope": {"in_symbolic_scope": ""},
    f"{COMMON}.tensor_attributes": {
        "get_tensor_attr": "tensor attr",
        "set_tensor_attr": "tensor attr value",
    },
    f"{COMMON}.variables": {
        "AutocastScope": "dtype",
        "get_autocast_scope": "",
    },
    f"{COMMON}.variables.AutocastScope": {"maybe_cast": "self value"},
    f"{COMMON}.variables.Variable": {
        "assign": "self value",
    },
    "keras.src.backend": {"compute_output_spec": "fn *args **kwargs"},
    f"{CORE_OWNER}.core": {
        "cast": "x dtype",
        "convert_to_tensor": "x dtype",
    },
    "keras.src.models.functional.Functional": {
        "call": "self inputs",
        "_run_through_graph": "self inputs operation_fn call_fn",
    },
    "keras.Function": {"_run_through_graph": "self inputs operation_fn"},
    "keras.src.saving.serialization_lib": {"SafeModeScope": "safe_mode"},
    "keras.src.trainers.compile_utils": {"CompileLoss": "loss loss_weights"},
    TRAINER: {
        "_aggregate_additional_loss": "self loss",
    },
    "keras.Model": {
        "_trackable_children": "self save_type **kwargs",
        "_aggregate_additional_loss": "self loss",
        "_symbolic_build": "self iterator data_batch",
        "_maybe_symbolic_build": "self iterator data_batch",
    },
    "keras.Layer": {
        "_check_super_called": "self",
        "_get_own_losses": "self",
        "rematerialized_call": "self layer_call *args **kwargs",
    },
    "keras.layers.MultiHeadAttention": {
        "_compute_attention": "self query key value attention_mask "
        "training return_attention_scores"
    },
    "keras.layers.GroupQueryAttention": {
        "_compute_attention": "self query key value attention_mask training"
    },
    "keras.StatelessScope": {
        "add_update": "self update",
        "get_current_value": "self variable",
    },
    "keras.Variable": {
        "_initialize": "self value",
        "_restore_from_tensors": "self restored_tensors",
        "_serialize_to_tensors": "self",
        "_export_to_saved_model_graph": "self object_map tensor_map options",
        "_write_object_proto": "self proto options",
    },
    "keras.optimizers.Optimizer": {
        "_trackable_children": "self save_type **kwargs",
        "_all_reduce_sum_gradients": "self grads_and_vars",
        "_check_variables_are_known": "self variables",
        "_get_variable_index": "self variable",
        "_is_excluded_from_weight_decay": "self variable",
        "_overwrite_variable_with_gradient": "self variable",
        "_use_weight_decay": "self variable",
        "_var_key": "self variable",
    },
    XLA: {
        "xla_optimization_barrier": "input name",
        "xla_call_module": "args version module Sout Tout",
        "xla_variadic_reduce_v2": "inputs init_values "
        "dimensions_to_reduce reducer",
        "xla_dot_v2": "lhs rhs dimension_numbers precision_config "
        "preferred_element_type",
    },
    "tensorflow.python.ops.gradients_util": {
        "_GradientsHelper": "ys xs grad_ys",
        "_MarkReachedOps": "from_ops reached_ops func_graphs",
    },
    "tensorflow.python.ops.custom_gradient": {
        "_eager_mode_decorator": "f args kwargs",
        "_graph_mode_decorator": "f args kwargs",
    },
    "tensorflow.python.eager.polymorphic_function.function_context": {
        "make_function_context": "scope_type",
    },
    "tensorflow.Graph": {"_get_control_flow_context": "self"},
    "tensorflow.__internal__.FuncGraph": {"capture": "self tensor"},
    "tensorflow.python.eager.record": {
        "could_possibly_record": "",
        "should_record_backprop": "tensors",
        "stop_recording": "",
        "record_operation": "op_type output_tensors input_tensors "
        "backward_function",
    },
    "tensorflow.python.eager.forwardprop_util": {"pack_tangents": "tensors"},
    "tensorflow.python.eager.imperative_grad": {
        "imperative_grad": "tape target sources output_gradients",
    },
    TRACKABLE: {"_lookup_dependency": "self name cached_dependencies"},
}

# Maps owners to attributes and their types.
CONSTANTS = {
    f"{COMMON}.global_state": {"GLOBAL_STATE_TRACKER": threading.local},
    "keras.src.dtype_policies.dtype_policy": {"global_state": types.ModuleType},
    CORE_OWNER: {"core": types.ModuleType},
    "keras.src.backend": {"ops": types.ModuleType},
    f"{COMMON}.variables": {"Variable": type},
    "keras.src.models.functional": {"Functional": type},
    "keras.src.models.functional.Functional": {"operations": property},
    "keras.src.trainers.trainer": {"BaseTrainer": type, "Trainer": type},
    "jax._src.array": {"ArrayImpl": type},
    "jax._src.xla_bridge": {"_topology_factories": dict},
    "keras.src.backend.jax.trainer": {"jit": types.FunctionType},
    "tensorflow.python.eager.record": {"VariableWatcher": type},
    "tensorflow.python.ops.control_flow_v2_func_graphs": {
        "ControlFlowFuncGraph": type,
    },
    TRACKABLE: {
        "_deferred_dependencies": property,
        "_unconditional_dependency_names": property,
    },
}


def built(make):
    """Returns a function that makes an object and runs it once on a batch."""

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


def attention(name="MultiHeadAttention"):
    layer = (
        keras.layers.GroupQueryAttention(4, 2, 1)
        if name == "GroupQueryAttention"
        else keras.layers.MultiHeadAttention(2, 4)
    )
    layer(*[np.ones((2, 3, 4), "float32")] * 2)
    return layer


def of_a_model():
    callback = keras.callbacks.Callback()
    callback.set_model(sequential())
    return callback


def softmax():
    return keras.activations.softmax(keras.Input((4,)))


def masked():
    return keras.layers.Masking()(keras.Input((3, 4)))


def tape():
    import tensorflow as tf

    with tf.GradientTape() as recorded:
        return recorded


# (the kind of object, how to make it, its attributes by their type)
ATTRIBUTES = [
    (
        "a layer",
        built(dense),
        {
            bool: "_called _call_has_training_arg",
            dict: "_build_shapes_dict",
            keras.DTypePolicy: "_dtype_policy",
            keras.Variable: "_kernel",
            list: "_inbound_nodes _layers _losses _metrics _seed_generators "
            "_non_trainable_variables _trainable_variables",
            SerializableDict: "_auto_config",
            set: "_loss_ids",
            str: "_parent_path _path",
            type(None): "_remat_mode",
        },
    ),
    ("a layer", dense, {type(None): "_parent_path _build_shapes_dict"}),
    (
        "a Functional",
        functional,
        {
            dict: "_nodes_by_depth",
            keras.KerasTensor: "_inputs_struct _outputs_struct",
            list: "_inputs",
        },
    ),
    ("a Sequential", sequential, {keras.Model: "_functional"}),
    (
        "a symbol",
        lambda: keras.Input((4,)),
        {str: "_dtype", tuple: "_keras_history"},
    ),
    ("an InputLayer", lambda: functional().layers[0], {str: "_dtype"}),
    (
        "MultiHeadAttention",
        attention,
        {
            float: "_dropout",
            int: "_value_dim",
            keras.layers.Softmax: "_softmax",
            tuple: "_attention_axes",
        },
    ),
    (
        "GroupQueryAttention",
        lambda: attention("GroupQueryAttention"),
        {bool: "_return_attention_scores", keras.layers.Softmax: "_softmax"},
    ),
    ("a callback", of_a_model, {keras.Model: "_model"}),
    ("a softmax", softmax, {object: "_keras_logits"}),
    ("a tensor", masked, {object: "_keras_mask"}),
    ("a tape", tape, {object: "_tape"}),
    (
        "a model",
        compiled,
        {
            keras.Loss: "_compile_loss",
            object: "_compile_config",
            type(None): "_compile_metrics",
        },
    ),
    ("a model", with_metrics, {keras.Metric: "_compile_metrics"}),
    ("a model", sequential, {type(None): "_compile_loss"}),
    (
        "metrics",
        lambda: with_metrics()._compile_metrics,
        {list: "_user_metrics", type(None): "_user_weighted_metrics"},
    ),
    (
        "a loss",
        lambda: compiled()._compile_loss,
        {
            list: "_user_loss_weights",
            str: "_user_loss",
            type(None): "_flat_losses",
        },
    ),
    (
        "an optimizer",
        optimizer,
        {
            dict: "_trainable_variables_indices",
            keras.Variable: "_iterations _learning_rate",
            list: "_trainable_variables _variables",
            object: "_distribution_strategy _tracker",
        },
    ),
    ("an optimizer", averaging, {list: "_model_variables_moving_average"}),
    (
        "a variable",
        lambda: keras.Variable([1.0]),
        {bool: "_autocast _trainable", object: "_value", str: "_dtype _path"},
    ),
    ("a tf.Variable", lambda: keras.Variable([1.0]).value, {str: "_unique_id"}),
]
ATTRIBUTES = [
    (owner, make, name, kind)
    for owner, make, kinds in ATTRIBUTES
    for kind, names in kinds.items()
    for name in names.split()
]

# The tests beside these names say what they mean.
ELSEWHERE = {
    # `f"_{name}"` is the function of an op: `ops/test_stand_ins.py`.
    "_*",
    # This is a replica's copy: `step/test_replicas.py`.
    "_get",
    # TensorFlow's variables have none in Keras 3.12, so it is read with a
    # default: `optimizers/test_sharded_slots.py`.
    "_layout",
    # `test_contract_meanings.py`, as the next one
    "_self_",
    "_trace",
    # These are the operators: `ops/test_finite_constants.py`.
    "jax._src.array.ArrayImpl.*",
    # Classes of activations work in `static_call`:
    # `ops/test_stand_ins.py`.
    "keras.src.activations.activations",
}


def contracts():
    """Returns every name that has a contract."""
    owned = [row[:2] for row in rows(FUNCTIONS) + rows(CONSTANTS)]
    modules = {owner for owner, _ in owned if is_module(owner)}
    inside = {".".join(each) for each in owned}
    plain = {name for _, name in owned} | {each[2] for each in ATTRIBUTES}
    return {*modules, *inside, *plain, *PACKAGES, *ELSEWHERE}


def rows(table):
    """Returns a table's rows: the owner, the name, what is expected of it."""
    return [
        (owner, name, expected)
        for owner, names in table.items()
        for name, expected in names.items()
    ]


def is_module(owner):
    return re.fullmatch(r"[a-z0-9_.]+", owner) is not None


def find(owner):
    """Returns a module, or an object in one, by its dotted name."""
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
    """Skips names of the other backend or of another Keras."""
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
