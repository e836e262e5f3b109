"""Changes the dtypes of a model's layers and variables, and restores them."""

import contextlib
from collections.abc import Callable

import keras

from tfmix import _formats
from tfmix._keras import graphs, layers, variables
from tfmix.autocast import layer_calls
from tfmix.conversion import planned_policies

Undo = Callable[[], None]

# Keras keeps these compiled functions, and would go on using the old dtypes.
_COMPILED = ("train_function", "test_function", "predict_function")


def set_dtypes(
    steps: list[planned_policies.Step], way_back: contextlib.ExitStack
) -> None:
    """Gives each layer of a plan its policy."""
    mixed = any(
        step.policy.compute_dtype in _formats.SIXTEEN_BIT for step in steps
    )
    cast = casts(steps)
    for step in steps:
        _set_policy(step.layer, step.policy, mixed, way_back)
        _note_origin(step, way_back)
        way_back.callback(graphs.widen_inputs(step.layer))
    for layer, before, after in cast:
        for variable in variables.own_variables(layer):
            # A variable of another dtype has it on purpose.
            if variable.dtype == before:
                variables.cast_in_place(variable, after)
    for step in reversed(steps):
        # Inner layers come first, because they decide what a nested model
        # returns. The caller decides what an input returns.
        if not layers.is_input(step.layer):
            _set_spec(step.layer, way_back)


def casts(steps: list[planned_policies.Step]) -> list[tuple]:
    """Lists the layers whose variables a plan casts, with both dtypes."""
    found = []
    for step in steps:
        policy = planned_policies.entry(step.policy, step.layer)
        before, after = step.layer.variable_dtype, policy.variable_dtype
        # A layer that is not built yet may still create variables.
        may_have = variables.own_variables(step.layer) or not step.layer.built
        if before != after and may_have:
            found.append((step.layer, before, after))
    return found


def check_undo(steps: list[planned_policies.Step]) -> None:
    """Refuses to undo a conversion whose layers were changed since."""
    for step in steps:
        made, now = (
            planned_policies.entry(policy, step.layer).name
            for policy in (step.policy, step.layer.dtype_policy)
        )
        if made != now and not layer_calls.reason(step.layer):
            raise RuntimeError(
                f"This conversion made layer {step.layer.name!r} {made!r}, and "
                f"it is {now!r} by now. Undo the later conversion first. A "
                "quantized model has no way back: quantize a copy instead."
            )


def forget_compiled(model: keras.Model) -> None:
    """Makes Keras trace the functions of a model and nested models again."""
    for layer in layers.flat_layers(model):
        for name in _COMPILED:
            if getattr(layer, name, None) is not None:
                setattr(layer, name, None)


def _set_policy(
    layer: keras.Layer,
    policy: keras.DTypePolicy,
    among_16_bit: bool,
    way_back: contextlib.ExitStack,
) -> None:
    before, methods = layer.dtype_policy, layers.by_role(layer)
    # The layer must not apply its former policy's rules at its first call.
    first_called = vars(layer).pop(layers.FIRST_CALLED, None)

    def restore() -> None:
        layers.set_policy(layer, before)
        layers.restore(layer, methods)
        if first_called is not None:
            layers.put(layer, layers.FIRST_CALLED, first_called)

    way_back.callback(restore)
    layers.detach(layer, layers.CALL)
    layers.set_policy(layer, policy)
    if among_16_bit and not layers.is_input(layer):
        layer_calls.attach(layer)


def _note_origin(
    step: planned_policies.Step, way_back: contextlib.ExitStack
) -> None:
    """Notes whether the user chose the dtype that a layer has now."""
    layer, before = step.layer, layers.marks(step.layer).origin
    origin = layers.CODE if step.by_choice else layers.DEFAULT
    if layers.dtype_origin(layer) != origin:
        layers.mark(layer, origin=origin)
        way_back.callback(layers.mark, layer, origin=before)


def _set_spec(layer: keras.Layer, way_back: contextlib.ExitStack) -> None:
    """Corrects the dtypes that a Functional graph keeps for its tensors."""
    for place, tensor in graphs.noted_results(layer):
        dtype = keras.backend.standardize_dtype(tensor.dtype)
        if dtype in _formats.LIMITS:
            graph = layers.is_structure(layer)
            results = layers.results(layer) if graph else None
            result = results[place].dtype if results else layer.compute_dtype
            graphs.note_dtype(way_back, tensor, str(result))
