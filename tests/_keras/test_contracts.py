"""What tfmix asks of the private side of Keras and TensorFlow, name by name.

Each name that `tfmix/_keras/` reaches into is in one of the tables: it is
there, and takes these arguments. The tests below them say what it means and
who calls it. A version of Keras that breaks tfmix breaks a test here first,
which says by its name what changed.
"""

import contextlib
import importlib
import importlib.util
import inspect
import pathlib
import re
import threading

import keras
import numpy as np
import pytest

from tests import helpers
from tests._keras import private_names

OURS = pathlib.Path(__file__).parent.parent.parent / "tfmix"
BACKEND = keras.backend.backend()
KERAS = tuple(int(part) for part in keras.__version__.split(".")[:2])
COMMON = "keras.src.backend.common"
FUNCTION = "tensorflow.python.eager.polymorphic_function.polymorphic_function"
XLA = "tensorflow.compiler.tf2xla.ops.gen_xla_ops"

tensorflow_only = helpers.requires_backend("tensorflow")
jax_only = helpers.requires_backend("jax")

# Names that belong to one backend, and those of newer versions of Keras.
TENSORFLOW_ONLY = {
    "_all_reduce_sum_gradients",
    "_distribution_strategy",
    "_get_control_flow_context",
    "_restore_from_tensors",
    "_run_functions_eagerly",
    "_serialize_to_tensors",
    "_unique_id",
    "Function",
    "IsXLAContext",
    "capture",
    "xla_optimization_barrier",
}
JAX_ONLY = {"_layout"}
SINCE = {
    # `keras.optimizers.MultiOptimizer` is not in Keras 3.12.
    "_inner_optimizers": (3, 15),
    "_var_to_optimizer_idx": (3, 15),
}
# Nobody has it yet: the next Keras keeps the backend's functions there.
FUTURE = {"keras.src.backend.ops", "keras.src.backend.ops.compute_output_spec"}

# What is only named as a place to look in.
PACKAGES = (
    "keras.src",
    "keras.src.backend",
    "keras.src.ops",
)

# (owner, attribute, the arguments it takes, further ones having defaults)
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
    ("keras.src.backend", "compute_output_spec", "fn *args **kwargs"),
    ("keras.src.models.functional.Functional", "call", "self inputs"),
    ("keras.src.saving.serialization_lib", "SafeModeScope", "safe_mode"),
    ("keras.src.trainers.compile_utils", "CompileLoss", "loss loss_weights"),
    (
        "keras.src.trainers.trainer.Trainer",
        "_aggregate_additional_loss",
        "self loss",
    ),
    (
        "keras.src.trainers.trainer.Trainer",
        "_compute_loss",
        "self x y y_pred sample_weight training",
    ),
    ("keras.Model", "_aggregate_additional_loss", "self loss"),
    (
        "keras.Model",
        "_compute_loss",
        "self x y y_pred sample_weight training",
    ),
    ("keras.Layer", "_check_super_called", "self"),
    ("keras.Layer", "_flatten_layers", "self include_self recursive"),
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
        "_overwrite_variable_with_gradient",
        "self variable",
    ),
    ("keras.optimizers.Optimizer", "_use_weight_decay", "self variable"),
    ("keras.optimizers.Optimizer", "_var_key", "self variable"),
    (XLA, "xla_optimization_barrier", "input name"),
    ("tensorflow.Graph", "_get_control_flow_context", "self"),
    ("tensorflow.__internal__.FuncGraph", "capture", "self tensor"),
]

# (owner, attribute, its type)
CONSTANTS = [
    (f"{COMMON}.global_state", "GLOBAL_STATE_TRACKER", threading.local),
    ("keras.src.models.functional", "Functional", type),
    ("keras.src.models.functional.Functional", "operations", property),
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


def optimizer():
    made = keras.optimizers.AdamW()
    made.build([keras.Variable([1.0], name="one")])
    made.exclude_from_weight_decay(var_names=["one"])
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
    ("a model", compiled, "_compile_loss", keras.Loss),
    ("a model", sequential, "_compile_loss", type(None)),
    ("a loss", lambda: compiled()._compile_loss, "_user_loss", str),
    ("a loss", lambda: compiled()._compile_loss, "_user_loss_weights", list),
    ("an optimizer", optimizer, "_distribution_strategy", object),
    ("an optimizer", optimizer, "_exclude_from_weight_decay", set),
    ("an optimizer", optimizer, "_exclude_from_weight_decay_cache", dict),
    ("an optimizer", optimizer, "_tracker", object),
    ("an optimizer", optimizer, "_trainable_variables", list),
    ("an optimizer", optimizer, "_trainable_variables_indices", dict),
    ("an optimizer", optimizer, "_variables", list),
    ("a MultiOptimizer", multi_optimizer, "_inner_optimizers", list),
    ("a MultiOptimizer", multi_optimizer, "_var_to_optimizer_idx", dict),
    ("a variable", lambda: keras.Variable([1.0]), "_dtype", str),
    ("a variable", lambda: keras.Variable([1.0]), "_layout", type(None)),
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
    # A replica's copy of a variable: `test_get_returns_this_replicas_copy`.
    "_get",
    # `test_what_tensorflow_tracks_starts_with_self`.
    "_self_",
    # `test_a_class_of_activations_works_in_static_call`.
    "keras.src.activations.activations",
}


def contracts():
    """Returns every name that is in a contract."""
    rows = [(owner, name) for owner, name, _ in FUNCTIONS + CONSTANTS]
    modules = {owner for owner, _ in rows if is_module(owner)}
    inside = {f"{owner}.{name}" for owner, name in rows}
    plain = {name for _, name in rows} | {row[2] for row in ATTRIBUTES}
    return {*modules, *inside, *plain, *PACKAGES, *ELSEWHERE, *FUTURE}


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
    """Skips what belongs to the other backend or to a newer Keras."""
    if name in TENSORFLOW_ONLY and BACKEND != "tensorflow":
        pytest.skip(f"{name} belongs to the TensorFlow backend")
    if name in JAX_ONLY and BACKEND != "jax":
        pytest.skip(f"{name} belongs to the JAX backend")
    if KERAS < SINCE.get(name, KERAS):
        pytest.skip(f"{name} is not yet in Keras {keras.__version__}")


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
