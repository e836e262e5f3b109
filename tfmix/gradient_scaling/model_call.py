"""Calls a float16 model between two gates, which scale its gradients inside.

Weights and inputs pass the first gate. Everything that a gradient can enter by
passes the second: results, added losses, and tensors that a layer keeps for a
later loss.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import keras

from tfmix import _messages
from tfmix._keras import global_state, layers, tapes, tracing
from tfmix._keras import variables as keras_variables
from tfmix.gradient_scaling import placing
from tfmix.ops import tensors

gates: Any
_TENSORFLOW = keras.backend.backend() == "tensorflow"
if _TENSORFLOW:
    import tensorflow as tf

    from tfmix.gradient_scaling import gates_tensorflow

    gates = gates_tensorflow
    _ARRAYS: Any = tf.Tensor
else:
    import jax
    import numpy as np

    from tfmix.gradient_scaling import gates_jax

    gates = gates_jax
    _ARRAYS = jax.Array, jax.core.Tracer, np.ndarray

# Models that scale their gradients inside.
_scaling: weakref.WeakSet[keras.Model] = weakref.WeakSet()
_NESTS = list, tuple, dict


def note_scaling(model: keras.Model, scales: bool) -> None:
    """Notes whether a model scales its gradients inside."""
    (_scaling.add if scales else _scaling.discard)(model)


def scales(variables: Iterable[keras.Variable]) -> bool:
    """Returns whether models scale the gradients of all these variables.

    Then the loss need not be scaled: any factor on the loss cancels at the
    gates exactly. A 16-bit variable does not count, because its gradient is
    16-bit outside the model, too, and may underflow there.
    """
    held = {id(variable) for model in _scaling for variable in model.variables}
    variables = list(variables)
    are_held = all(id(variable) in held for variable in variables)
    return are_held and not any(map(keras_variables.is_narrow, variables))


def between_gates(
    model: keras.Model, call: Callable, args: tuple, kwargs: dict
) -> Any:
    """Calls a model, between gates if a layer of it computes in float16.

    Args:
        model: The outermost model of the call.
        call: Computes its results, in float32.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.

    Returns:
        The results of `call`, as tensors of the same values.
    """
    if not layers.computes_in(model, "float16"):
        return call(*args, **kwargs)
    if not tapes.may_be_asked():
        results = call(*args, **kwargs)
        return _unscaled(model.name, results) if _TENSORFLOW else results
    nest = tensors.map_leaves((args, kwargs), keras_variables.read)
    given = list(filter(_is_float, _arrays(nest)))
    exact = [*map(tensors.before_cast, given)]
    scope = global_state.open_scope()
    states = {} if scope is None else dict(scope.state_mapping)
    mapped = {key: x for key, x in states.items() if _is_float(x)}
    values = [*exact, *mapped.values()]
    held = [] if _TENSORFLOW or scope else _traced(model)
    if not (_TENSORFLOW or held or any(map(tracing.is_symbolic, values))):
        return call(*args, **kwargs)
    flat = layers.flat_layers(model)
    before = _items(flat)
    held += _held(nest, before, values)
    values += [item.value for item in held]
    pair = gates.Gates(placing.of(model), _overwritten(model, states))
    inside = iter(pair.enter(values))
    new = [(*both, next(inside)) for both in zip(given, exact, strict=True)]
    mapped = {key: next(inside) for key in mapped}
    known = [loss for _, loss in layers.added_losses(flat)]
    with (
        _mapped_to(scope, states, mapped),
        _replaced(held, [*inside], before),
        pair.opened(),
    ):
        args, kwargs = _with_arrays(nest, new)
        outputs = call(*args, **kwargs)
        # An unbuilt model has new layers.
        flat = layers.flat_layers(model)
        left = _left(flat, before)
        # It is float32, like the results: a loss that casts 16 bits itself
        # would send its gradient back through 16 bits before a gate scales it.
        wide = tensors.to_float32_with_notes
        kept = [tensors.map_leaves(item.value, wide) for item in left]
    added = [
        (layer, loss)
        for layer, loss in layers.added_losses(flat)
        if all(loss is not other for other in known)
    ]
    passing, rebuilt = floats((outputs, kept))
    results, losses = pair.leave(passing, [loss for _, loss in added])
    outputs, kept = rebuilt(results)
    for item, value in zip(left, kept, strict=True):
        item.put(value)
    for (layer, inner), loss in zip(added, losses, strict=True):
        layers.put_loss(layer, inner, loss)
    return outputs


def _unscaled(name: str, results: Any) -> Any:
    """Returns the results of a trace in which no gradient is scaled.

    A `tf.function` is traced again under a tape, but a concrete function is
    not.
    """
    for result in filter(tracing.is_symbolic, _arrays(results)):
        if _is_float(result):
            tapes.when_asked(
                result,
                lambda: _messages.warn_once(
                    f"the gradients of {name!r} are not scaled in float16, so "
                    "small ones are lost: its concrete function was traced "
                    "outside of a tape. Call the `tf.function`, or trace it "
                    "inside a `tf.GradientTape`",
                    about=("concrete function", name),
                ),
            )
    return results


@contextlib.contextmanager
def _mapped_to(
    scope: keras.StatelessScope | None, before: dict, inside: dict
) -> Iterator[None]:
    """Gives a scope other values of variables in a block.

    Values that the block assigns stay. Under JAX they have no gradients, which
    would pass no gate.
    """
    if scope is None:
        yield
        return
    now = scope.state_mapping
    now.update(inside)
    try:
        yield
    finally:
        for key, value in now.items():
            if key in inside and value is inside[key]:
                now[key] = before[key]
            elif value is not before.get(key) and not _TENSORFLOW:
                now[key] = jax.lax.stop_gradient(value)


@contextlib.contextmanager
def _replaced(
    items: list["_Item"], values: Iterable, known: "Items"
) -> Iterator[None]:
    """Puts other values in place of items in a block."""
    new = [
        item._replace(value=value)
        for item, value in zip(items, values, strict=True)
    ]
    for item in new:
        known[id(item.container), item.key] = item
        item.put(item.value)
    try:
        yield
    finally:
        for item, other in zip(items, new, strict=True):
            if other.is_there():
                item.put(item.value)


def _held(nest: Any, items: "Items", others: list) -> list["_Item"]:
    """Lists further tensors of a call that gradients reach.

    They are attributes of a layer, or of an argument of the user's own class.
    """
    owners: list = []
    tensors.map_leaves(nest, owners.append)
    of_arguments = _items(x for x in owners if not _is_array(x))
    return [
        item
        for item in (*items.values(), *of_arguments.values())
        if _is_array(item.value)
        and _is_float(item.value)
        and gates.is_reached(item.value, others)
    ]


def _traced(model: keras.Model) -> list["_Item"]:
    """Lists weights that JAX traces although no scope holds them.

    Code may have assigned the tracers.
    """
    places = map(keras_variables.place_of_value, model.trainable_variables)
    items = [_Item(*place) for place in places]
    return [item for item in items if tracing.is_symbolic(item.value)]


def _overwritten(model: keras.Model, states: dict[int, Any]) -> set[int]:
    """Returns the `id`s of values whose gradient is their next value."""
    variables = filter(keras_variables.is_overwritten, model.variables)
    return {
        id(states.get(id(v), keras_variables.local(v.value))) for v in variables
    }


class _Item(NamedTuple):
    """An array, or a nest of arrays, that is an attribute of a layer.

    Attributes:
        container: The layer's attributes, or a list or dict among them.
        key: The place in the container.
        value: What is there.
    """

    container: Any
    key: Any
    value: Any

    def is_among(self, items: "Items") -> bool:
        """Returns whether one of the items is the same value in this place."""
        same = items.get((id(self.container), self.key))
        return same is not None and same.value is self.value

    def is_there(self) -> bool:
        """Returns whether the value is still in its place."""
        is_list = isinstance(self.container, list)
        keys = range(len(self.container)) if is_list else self.container
        return self.key in keys and self.container[self.key] is self.value

    def put(self, value: Any) -> None:
        """Puts a value in its place."""
        self.container[self.key] = value


# An item by the `id` of its container, and its key there.
Items = dict[tuple[int, Any], _Item]


def _items(owners: Iterable, before: Items | None = None) -> Items:
    """Returns the arrays and nests that are attributes of objects.

    Args:
        owners: Layers and other objects.
        before: What they held before a call. A list or dict that is new is one
            nest, and an earlier one may have new items.
    """
    found: Items = {}
    every = [getattr(owner, "__dict__", {}) for owner in owners]
    waiting: list[tuple[Any, Any]] = [
        (attributes, name)
        for attributes in every
        for name in layers.users_attributes(attributes)
    ][::-1]
    while waiting:
        container, key = waiting.pop()
        value = container[key]
        kind: Any = type(value)
        is_nest = issubclass(kind, _NESTS)
        place = id(container), key
        if not (is_nest or _is_array_type(kind)) or place in found:
            continue
        found[place] = item = _Item(container, key, value)
        if is_nest and (before is None or item.is_among(before)):
            keys = value if isinstance(value, dict) else range(len(value))
            waiting += reversed([(value, inner) for inner in keys])
    return found


def _left(flat: list, before: Items) -> list[_Item]:
    """Lists what a call left on layers, such as scores for a later loss."""
    new = [x for x in _items(flat, before).values() if not x.is_among(before)]
    return [x for x in new if any(map(_is_float, _arrays(x.value)))]


def _with_arrays(nest: Any, new: Iterable[tuple]) -> Any:
    """Returns a nest with others in place of its float arrays.

    Args:
        nest: The nest.
        new: For each array itself, what it was before a cast, and the other.
    """
    triples = iter(new)

    def replaced(array: Any) -> Any:
        if not _is_float(array):
            return array
        before, exact, value = next(triples)
        if exact is before:
            return value
        # Exact numbers are rounded here, as they are where the model begins.
        cast = keras.ops.cast(value, before.dtype)
        tensors.note_cast(before, cast, value)
        return cast

    return _rebuilt(nest, replaced)


def floats(nest: Any) -> tuple[list, Callable[[list], Any]]:
    """Returns a nest's float arrays and what is attached, as for a gate.

    It also returns the function that puts others in their place.
    """

    def rebuilt(values: list) -> Any:
        new = iter(values)
        return _rebuilt(nest, lambda x: next(new) if _is_float(x) else x)

    return list(filter(_is_float, _arrays(nest))), rebuilt


def _arrays(nest: Any) -> list:
    """Lists the arrays of a nest, and what is attached to each."""
    arrays: list = []

    def noted(array: Any) -> Any:
        arrays.append(array)
        return array

    _rebuilt(nest, noted)
    return arrays


def _rebuilt(nest: Any, function: Callable[[Any], Any]) -> Any:
    """Applies a function to the arrays of a nest and what is attached."""
    return tensors.map_leaves(nest, functools.partial(_rebuilt_leaf, function))


def _rebuilt_leaf(function: Callable[[Any], Any], leaf: Any) -> Any:
    # A function that called itself by a closure would be a reference cycle,
    # which keeps eager tensors until Python collects garbage.
    if _TENSORFLOW and isinstance(leaf, tf.__internal__.CompositeTensor):
        # These are ragged or sparse tensors.
        of_part = functools.partial(_rebuilt_leaf, function)
        return tf.nest.map_structure(of_part, leaf, expand_composites=True)
    if not _is_array(leaf):
        return leaf
    new = function(leaf)
    tensors.copy_notes(leaf, new, lambda x: function(x) if _is_array(x) else x)
    return new


def _is_array(value: Any) -> bool:
    kind: Any = type(value)
    return _is_array_type(kind)


@functools.cache
def _is_array_type(kind: Any) -> bool:
    # Each attribute of a layer is asked, and TensorFlow's check takes long.
    return issubclass(kind, _ARRAYS)


def _is_float(array: Any) -> bool:
    if _TENSORFLOW:
        # Keras refuses the dtypes of handles.
        return bool(array.dtype.is_floating or array.dtype.is_complex)
    return bool(jax.numpy.issubdtype(array.dtype, jax.numpy.inexact))
