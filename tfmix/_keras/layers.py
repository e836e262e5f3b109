"""The parts of Keras's layers that the numerics tools reach into.

Checked on Keras 3.12.4 and 3.15.1.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras

from tfmix._keras import layer_policies


def is_structure(layer: Any) -> bool:
    """Says whether a layer only connects others: Sequential, Functional."""
    functional = importlib.import_module("keras.src.models.functional")
    if not isinstance(layer, keras.Sequential | functional.Functional):
        return False
    # A subclass with a `call` of its own computes what it likes.
    return type(layer).call in (
        keras.Sequential.call,
        functional.Functional.call,
    )


def is_builtin(layer: Any) -> bool:
    """Says whether a layer's class is part of Keras."""
    return type(layer).__module__.split(".")[0] == "keras"


def inner_operations(layer: Any) -> list[Any]:
    """Returns what a layer holds: layers, and the ops of a graph."""
    if isinstance(layer, keras.Sequential):
        return list(layer.layers)
    if is_structure(layer):
        return list(layer.operations)
    return list(getattr(layer, "_layers", []))


def flat_layers(layer: Any) -> list[Any]:
    """Returns a layer and every layer inside it, each once."""
    if not isinstance(layer, keras.Layer):
        return []
    found = {id(inner): inner for inner in layer._flatten_layers()}
    return list(found.values())


def parts(layer: keras.Layer) -> list[keras.Layer]:
    """Returns the layers that a layer holds itself."""
    return list(layer._layers)


def results(model: keras.Layer) -> list[Any]:
    """Returns the symbolic results of a Functional or Sequential model."""
    graph = getattr(model, "_functional", None) or model
    return keras.tree.flatten(getattr(graph, "outputs", None) or [])


def maker(tensor: keras.KerasTensor) -> tuple[Any, list[Any]]:
    """Returns what made a symbolic tensor, and the tensors it took."""
    operation, node, _ = tensor._keras_history
    nodes = operation._inbound_nodes
    return operation, nodes[node].input_tensors if nodes else []


def noted_results(layer: keras.Layer) -> list[tuple[int, Any]]:
    """Returns the results that graphs noted for a layer, with their place."""
    return [
        (place, tensor)
        for node in layer._inbound_nodes
        for place, tensor in enumerate(keras.tree.flatten(node.outputs))
    ]


def symbolic_arguments(model: keras.Model) -> list[Any]:
    """Returns what to call a model with, as symbols; empty if not known."""
    structure = getattr(model, "_inputs_struct", None)
    if structure is not None:
        return [structure]
    if isinstance(model, keras.Sequential) and model.inputs:
        return list(model.inputs[:1])
    shapes = model._build_shapes_dict or {}
    return [keras.KerasTensor(s, "float32") for s in shapes.values()]


def call_in_training(model: keras.Model, inputs: Any) -> Any:
    """Calls a model in training mode, if it knows modes."""
    if getattr(model, "_call_has_training_arg", False):
        return model(inputs, training=True)
    return model(inputs)


def owns_random_numbers(layer: Any) -> bool:
    """Says whether a layer, or a part of a layer of Keras's, draws numbers."""
    parts = flat_layers(layer) if is_builtin(layer) else [layer]
    return any(getattr(part, "_seed_generators", None) for part in parts)


@contextlib.contextmanager
def policies(plan: Mapping[Any, keras.DTypePolicy]) -> Iterator[None]:
    """Gives layers other dtype policies for the length of a block.

    Keras's setter is not used: it would write into the user's own
    `DTypePolicyMap`.
    """
    before = {layer: vars(layer)["_dtype_policy"] for layer in plan}
    undo = []
    try:
        for layer, policy in plan.items():
            object.__setattr__(layer, "_dtype_policy", policy)
            if policy is not before[layer]:
                undo.append(layer_policies.widen_inputs(layer))
        yield
    finally:
        for restore in reversed(undo):
            restore()
        for layer, policy in before.items():
            object.__setattr__(layer, "_dtype_policy", policy)


def autocast(dtype: str | None) -> Any:
    """Returns a scope in which variables are read in a dtype."""
    variables = importlib.import_module("keras.src.backend.common.variables")
    return variables.AutocastScope(dtype)


@contextlib.contextmanager
def trial() -> Iterator[Any]:
    """Yields the open `keras.StatelessScope`, and puts it back as it was."""
    scopes = importlib.import_module("keras.src.backend.common.stateless_scope")
    scope = scopes.get_stateless_scope()
    mapping, losses = dict(scope.state_mapping), list(scope.losses)
    try:
        yield scope
    finally:
        scope.state_mapping, scope.losses = mapping, losses


def is_number(tensor: Any) -> bool:
    """Says whether a tensor holds values, and is no part of a trace."""
    if keras.backend.backend() != "jax":
        return hasattr(tensor, "numpy")
    import jax

    return not isinstance(tensor, jax.core.Tracer)


@contextlib.contextmanager
def calls_replaced(
    operations: list[Any], make: Callable[[int, Any], Any]
) -> Iterator[None]:
    """Replaces `operation.call` on single instances for a block.

    `make` gets an index and the original `call`, and returns the new one.
    """
    before = [
        (operation, vars(operation).get("call")) for operation in operations
    ]
    try:
        for index, operation in enumerate(operations):
            replacement = make(index, operation.call)
            # Past Keras's attribute tracking, which is for a layer's state.
            object.__setattr__(operation, "call", replacement)
        yield
    finally:
        for operation, own in before:
            if own is not None:
                object.__setattr__(operation, "call", own)
            else:
                vars(operation).pop("call", None)


def run_on_shapes(function: Callable[..., Any], inputs: list[Any]) -> Any:
    """Runs a function on `keras.KerasTensor`s, computing nothing."""
    backend = importlib.import_module("keras.src.backend")
    # The next Keras keeps the backend's functions one level deeper.
    backend = getattr(backend, "ops", backend)
    run = getattr(backend, "compute_output_spec", None)
    if run is None:
        raise RuntimeError(
            "tfmix does not fit this version of Keras: its backend has no "
            "'compute_output_spec'. Install Keras 3.12 to 3.15."
        )
    return run(function, *inputs)


def copy_mask(source: Any, destination: Any) -> None:
    """Hands the mask of one tensor, if it has one, on to another."""
    masking = importlib.import_module("keras.src.backend.common.masking")
    mask = masking.get_keras_mask(source)
    if mask is not None:
        masking.set_keras_mask(destination, mask)


def compile_loss(loss: Any, weights: Any = None) -> Any:
    """Returns the function that `compile(loss=loss)` would train with."""
    utils = importlib.import_module("keras.src.trainers.compile_utils")
    return utils.CompileLoss(loss=loss, loss_weights=weights)


def compiled_loss(model: Any) -> Any:
    """Returns a fresh copy of a model's compiled loss, None without one."""
    compiled = getattr(model, "_compile_loss", None)
    if compiled is None:
        return None
    return compile_loss(compiled._user_loss, compiled._user_loss_weights)


def compute_loss(model: keras.Model, **arguments: Any) -> Any:
    """Computes a model's loss as its training step does."""
    return model._compute_loss(**arguments)
