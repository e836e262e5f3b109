"""Changes a model's layers and variables, and can change them back.

Reaches into `keras.src`; checked on Keras 3.12.4 and 3.15.1.
"""

from collections.abc import Callable, Iterable
from typing import Any

import keras

from tfmix import _formats
from tfmix._keras import layer_policies, nested_inputs
from tfmix.conversion import planned_policies
from tfmix.policy.in_force import suited_optimizer, uncast_inputs

Undo = Callable[[], None]

# What Keras compiled once and would go on using.
_COMPILED = ("train_function", "test_function", "predict_function")
_FIRST_CALLED = "_check_super_called"


def set_dtypes(steps: Iterable[planned_policies.Step]) -> Undo:
    """Gives each layer of a plan its policy.

    Args:
        steps: The plan.

    Returns:
        A function that puts the policies and variables back.
    """
    undo: list[Undo] = []
    steps = list(steps)
    mixed = any(
        step.policy.compute_dtype in _formats.SIXTEEN_BIT for step in steps
    )
    for step in steps:
        before = step.layer.variable_dtype
        undo.append(_set_policy(step.layer, step.policy, mixed))
        undo.append(_cast_variables(step.layer, before))
        undo.append(nested_inputs.widen_inputs(step.layer))
    for step in reversed(steps):
        # Inner layers first: a nested model returns what they return.
        undo.append(_set_spec(step.layer))
    return lambda: _run(undo)


def forget_compiled(model: Any) -> None:
    """Lets Keras trace a model's functions anew at their next use.

    Args:
        model: A model; nested ones have functions of their own.
    """
    for layer in model._flatten_layers():
        for name in _COMPILED:
            if getattr(layer, name, None) is not None:
                setattr(layer, name, None)


def _run(undo: list[Undo]) -> None:
    for step in reversed(undo):
        step()


def _set_policy(
    layer: Any, policy: keras.DTypePolicy, among_16_bit: bool
) -> Undo:
    before = layer.dtype_policy
    names = (_FIRST_CALLED, "call")
    attributes = {
        name: vars(layer)[name] for name in names if name in vars(layer)
    }
    # Rules of the policy it was made under must not come back later.
    vars(layer).pop(_FIRST_CALLED, None)
    uncast_inputs.forget_exact(layer)
    layer_policies.set_policy(layer, policy)
    if among_16_bit:
        uncast_inputs.keep_exact(layer)
        if policy.compute_dtype == "float32":
            uncast_inputs.look_behind_casts(layer)

    def restore() -> None:
        uncast_inputs.forget_exact(layer)
        layer_policies.set_policy(layer, before)
        for name, value in attributes.items():
            layer_policies.put(layer, name, value)

    return restore


def _cast_variables(layer: Any, before: str) -> Undo:
    """Casts the variables a layer itself holds in its dtype before."""
    undo: list[Undo] = []
    dtype = layer.variable_dtype
    own = [*layer._trainable_variables, *layer._non_trainable_variables]
    for variable in own:
        # One of another dtype was given it on purpose.
        if dtype != before == variable.dtype:
            undo.append(_cast_variable(variable, dtype))
    return lambda: _run(undo)


def _cast_variable(variable: Any, dtype: str) -> Undo:
    before = variable.dtype
    original = keras.ops.convert_to_numpy(variable.value)
    _replace_value(variable, dtype)
    narrowed = keras.ops.convert_to_numpy(variable.value)

    def restore() -> None:
        now = keras.ops.convert_to_numpy(variable.value)
        _replace_value(variable, before)
        # What was not trained since gets back the bits the cast took.
        untouched = now == narrowed
        wide = now.astype(original.dtype)
        wide[untouched] = original[untouched]
        variable.assign(wide)

    return restore


def _replace_value(variable: Any, dtype: str) -> None:
    value = keras.ops.cast(variable.value, dtype)
    if not all(hasattr(variable, name) for name in ("_dtype", "_initialize")):
        raise RuntimeError(
            f"tfmix does not fit Keras {keras.__version__}: its variables "
            "cannot be cast in place. Build the model under the policy and "
            "load its weights."
        )
    variable._dtype = dtype
    variable._initialize(value)


def _set_spec(layer: Any) -> Undo:
    """Corrects the dtypes a Functional graph noted for a layer's results."""
    undo: list[Undo] = []
    for node in layer._inbound_nodes:
        tensors = keras.tree.flatten(node.outputs)
        for index, tensor in enumerate(tensors):
            dtype = keras.backend.standardize_dtype(tensor.dtype)
            if dtype in _formats.FORMATS:
                undo.append(_restore_attribute(tensor, "_dtype"))
                tensor._dtype = _result_dtype(layer, index)
    return lambda: _run(undo)


def _result_dtype(layer: Any, index: int) -> str:
    inner = getattr(layer, "_functional", None) or layer
    if suited_optimizer.is_graph(layer) and getattr(inner, "outputs", None):
        return str(keras.tree.flatten(inner.outputs)[index].dtype)
    return str(layer.compute_dtype)


def _restore_attribute(owner: Any, name: str) -> Undo:
    before = getattr(owner, name)
    return lambda: setattr(owner, name, before)
