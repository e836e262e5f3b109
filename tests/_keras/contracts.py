"""The private names of Keras and TensorFlow that tfmix uses, one by one.

Each name that `tfmix/_keras/` reaches into is in one of the tables, and exists
(`test_contract_names.py`). The other contract tests
check what a name means where a change of it would be silent: no other test
would fail. A version of Keras without a name fails here, which names it.
"""

import contextlib
import importlib
import pathlib
import re

import keras
import numpy as np
import pytest

import tfmix
from tests import helpers

OURS = pathlib.Path(tfmix.__file__).parent
BACKEND = keras.backend.backend()
KERAS = tuple(int(part) for part in keras.__version__.split(".")[:2])
COMMON = "keras.src.backend.common"
OPS = "keras.src.ops"
POLYMORPHIC = "tensorflow.python.eager.polymorphic_function"
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

# Maps owners to the names that tfmix takes from them.
OWNED = {
    f"{COMMON}.global_state": "get_global_attribute set_global_attribute "
    "GLOBAL_STATE_TRACKER",
    f"{COMMON}.masking": "get_keras_mask set_keras_mask",
    f"{COMMON}.name_scope": "current_path",
    f"{COMMON}.stateless_scope": "get_stateless_scope",
    f"{COMMON}.symbolic_scope": "in_symbolic_scope",
    f"{COMMON}.tensor_attributes": "get_tensor_attr set_tensor_attr",
    f"{COMMON}.variables": "AutocastScope get_autocast_scope Variable",
    f"{COMMON}.variables.AutocastScope": "maybe_cast",
    f"{COMMON}.variables.Variable": "assign",
    "keras.src.backend": "compute_output_spec ops",
    "keras.src.backend.random": "dropout",
    f"{CORE_OWNER}.core": "cast convert_to_tensor",
    "keras.src.models.functional.Functional": "call _run_through_graph "
    "operations",
    "keras.Function": "_run_through_graph",
    "keras.src.saving.keras_saveable": "KerasSaveable",
    "keras.src.saving.serialization_lib": "SafeModeScope",
    "keras.src.trainers.compile_utils": "CompileLoss",
    "keras.Model": "_trackable_children _symbolic_build _maybe_symbolic_build",
    "keras.Layer": "_check_super_called _get_own_losses rematerialized_call",
    "keras.layers.MultiHeadAttention": "_compute_attention",
    "keras.layers.GroupQueryAttention": "_compute_attention",
    "keras.StatelessScope": "add_update get_current_value",
    "keras.Variable": "_initialize _restore_from_tensors "
    "_serialize_to_tensors _export_to_saved_model_graph "
    "_write_object_proto",
    "keras.optimizers.Optimizer": "_trackable_children "
    "_all_reduce_sum_gradients _check_variables_are_known "
    "_get_variable_index _is_excluded_from_weight_decay "
    "_overwrite_variable_with_gradient _use_weight_decay _var_key",
    XLA: "xla_optimization_barrier xla_call_module xla_variadic_reduce_v2 "
    "xla_dot_v2",
    "tensorflow.python.ops.gradients_util": "_GradientsHelper _MarkReachedOps",
    "tensorflow.python.ops.custom_gradient": "_eager_mode_decorator "
    "_graph_mode_decorator",
    f"{POLYMORPHIC}.function_context": "make_function_context",
    "tensorflow.Graph": "_get_control_flow_context",
    "tensorflow.__internal__.FuncGraph": "capture",
    "tensorflow.python.eager.record": "could_possibly_record "
    "should_record_backprop stop_recording record_operation "
    "VariableWatcher",
    "tensorflow.python.eager.forwardprop_util": "pack_tangents",
    "tensorflow.python.eager.imperative_grad": "imperative_grad",
    TRACKABLE: "_lookup_dependency _deferred_dependencies "
    "_unconditional_dependency_names",
    "keras.src.dtype_policies.dtype_policy": "global_state",
    "keras.src.models.functional": "Functional",
    "keras.src.trainers.trainer": "BaseTrainer Trainer",
    "jax._src.array": "ArrayImpl",
    "jax._src.xla_bridge": "_topology_factories",
    "keras.src.backend.jax.trainer": "jit",
    "tensorflow.python.ops.control_flow_v2_func_graphs": "ControlFlowFuncGraph",
}
OWNED[CORE_OWNER] = f"{OWNED.get(CORE_OWNER, '')} core"


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


def first_input():
    return functional().layers[0]


def a_loss():
    return compiled()._compile_loss


def metrics():
    return with_metrics()._compile_metrics


def variable():
    return keras.Variable([1.0])


def tensorflow_variable():
    return variable().value


def symbol():
    return keras.Input((4,))


def grouped_attention():
    return attention("GroupQueryAttention")


# Makes an object, and has these attributes.
ATTRIBUTES = {
    built(dense): "_called _call_has_training_arg _build_shapes_dict "
    "_dtype_policy _kernel _inbound_nodes _layers _losses _metrics "
    "_seed_generators _non_trainable_variables _trainable_variables "
    "_auto_config _loss_ids _parent_path _path _remat_mode",
    # These are there before the first call, too.
    dense: "_parent_path _build_shapes_dict",
    functional: "_nodes_by_depth _inputs_struct _outputs_struct _inputs",
    sequential: "_functional _compile_loss",
    symbol: "_dtype _keras_history",
    first_input: "_dtype",
    attention: "_dropout _value_dim _softmax _attention_axes",
    grouped_attention: "_return_attention_scores _softmax",
    of_a_model: "_model",
    softmax: "_keras_logits",
    masked: "_keras_mask",
    tape: "_tape",
    compiled: "_compile_loss _compile_config _compile_metrics",
    metrics: "_user_metrics _user_weighted_metrics",
    a_loss: "_user_loss_weights _user_loss _flat_losses",
    optimizer: "_trainable_variables_indices _iterations _learning_rate "
    "_trainable_variables _variables _distribution_strategy _tracker",
    averaging: "_model_variables_moving_average",
    variable: "_autocast _trainable _value _dtype _path",
    tensorflow_variable: "_unique_id",
}
# The tests beside these names say what they mean.
ELSEWHERE = {
    # `f"_{name}"` is the function of an op: `ops/test_float32_ops.py`.
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
}


def attributes():
    """Returns the names of all attributes."""
    return set(" ".join(ATTRIBUTES.values()).split())


def contracts():
    """Returns every name that has a contract."""
    modules = {owner for owner in OWNED if is_module(owner)}
    inside = {".".join(each) for each in owned()}
    plain = {name for _, name in owned()} | attributes()
    return {*modules, *inside, *plain, *PACKAGES, *ELSEWHERE}


def owned():
    """Lists the owner and the name of each row."""
    return [
        (owner, name)
        for owner, names in OWNED.items()
        for name in names.split()
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


def is_here(name):
    """Returns whether a name belongs to this backend and this Keras."""
    is_other = name in TENSORFLOW_ONLY and BACKEND != "tensorflow"
    known = SINCE.get(name, KERAS) <= KERAS <= UNTIL.get(name, KERAS)
    return known and not is_other


def skip_unless_here(name):
    if not is_here(name):
        pytest.skip(f"{name} is not in Keras {keras.__version__} on {BACKEND}")
