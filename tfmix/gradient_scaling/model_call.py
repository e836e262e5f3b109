"""Calls a float16 model so that its gradients are scaled inside it only."""

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import keras

from tfmix import _messages
from tfmix._keras import (
    context_values,
    global_state,
    layers,
    tapes,
    tracing,
)
from tfmix._keras import variables as keras_variables
from tfmix.gradient_scaling import placing
from tfmix.ops import exact_values, tensors

_TENSORFLOW = keras.backend.backend() == "tensorflow"
if _TENSORFLOW:
    import tensorflow as tf

    from tfmix.gradient_scaling import tensorflow_border

    _ARRAYS: Any = tf.Tensor
else:
    import jax
    import numpy as np

    from tfmix.gradient_scaling import jax_border

    _ARRAYS = jax.Array, jax.core.Tracer, np.ndarray

# Models that scale their gradients inside.
_scaling: weakref.WeakSet[keras.Model] = weakref.WeakSet()
_NESTS = list, tuple, dict
# Maps the `id` of a variable to its value, like a `keras.StatelessScope`.
States = dict[int, Any]


def note_scaling(model: keras.Model, scales: bool) -> None:
    """Notes whether a model scales its gradients inside."""
    (_scaling.add if scales else _scaling.discard)(model)


def scales(variables: Iterable[keras.Variable]) -> bool:
    """Returns whether models scale the gradients of all these variables.

    Then the loss need not be scaled: any factor on the loss cancels at the
    border exactly. A 16-bit variable does not count, because its gradient is
    16-bit outside the model, too, and may underflow there.
    """
    held = {id(variable) for model in _scaling for variable in model.variables}
    variables = list(variables)
    are_held = all(id(variable) in held for variable in variables)
    return are_held and not any(map(keras_variables.is_narrow, variables))


def at_border(
    model: keras.Model, call: Callable, args: tuple, kwargs: dict
) -> Any:
    """Calls a model, inside a border if a layer of it computes in float16.

    Args:
        model: The outermost model of the call.
        call: Computes its results, in float32: a method.
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
    scope = global_state.open_scope()
    inputs = _inputs(model, (args, kwargs), scope)
    values = _values(model, inputs)
    if not _TENSORFLOW:
        # An unbuilt model creates its variables in the call.
        is_traced = any(map(tracing.is_symbolic, values))
        if not is_traced or not layers.is_built(model):
            return call(*args, **kwargs)
    function = _as_function(model, call, inputs)
    overwritten = _overwritten(model, inputs)
    with context_values.holding(place=placing.of(model)):
        if _TENSORFLOW:
            floats, losses, rest = tensorflow_border.call(
                function,
                values,
                again=functools.partial(function, start=_start(model)),
                overwritten=overwritten,
            )
        else:
            floats, losses, rest = jax_border.call(
                function, values, overwritten
            )
    return _finished(model, scope, floats, losses, rest)


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


class _Inputs(NamedTuple):
    """Everything that a call depends on, besides its model.

    Attributes:
        nest: The arguments of the call, and its keyword arguments.
        given: Those arrays of the nest that are arguments of the function.
        collects: Whether the stateless scope around the call collects losses;
            `None` without one. The scope itself gets the losses of the border,
            which hold the function that these inputs are for.
        states: The values that the scope has for variables.
        mapped: The `id`s of those variables whose values are arguments.
        context: What Keras knows of the call, such as `training`.
    """

    nest: Any
    given: list
    collects: bool | None
    states: States
    mapped: list[int]
    context: Any


@dataclasses.dataclass(frozen=True)
class _Rest:
    """The results of a call, besides its float arrays and its losses.

    Attributes:
        others: Its other arrays.
        updates: The values that it assigned to variables.
        outputs: The nest of its results, by which they are put together.
        left: What it left on layers, such as scores for a later loss.
        added: The layers that added losses.
    """

    others: list
    updates: States
    outputs: Any
    left: list["_Item"]
    added: list[tuple[keras.Layer, Any]]


if not _TENSORFLOW:
    jax.tree_util.register_dataclass(
        _Rest, ["others", "updates"], ["outputs", "left", "added"]
    )


def _inputs(
    model: keras.Model, nest: Any, scope: keras.StatelessScope | None
) -> _Inputs:
    nest = tensors.map_leaves(nest, keras_variables.unwrap)
    states = {} if scope is None else dict(scope.state_mapping)
    others = _of_others(model) if states else set()
    return _Inputs(
        nest,
        given=list(filter(_is_argument, _arrays(nest))),
        collects=scope and scope.collect_losses,
        states=states,
        mapped=[
            key
            for key, x in states.items()
            if _is_argument(x) and key not in others
        ],
        context=global_state.call_state(),
    )


def _of_others(model: keras.Model) -> set[int]:
    """Returns the `id`s of the variables of other models.

    A discriminator's weights must not get a part of their gradient through the
    generator, where it would become NaN if the discriminator overflows.
    """
    own = {id(variable) for variable in model.variables}
    return {id(v) for other in _scaling for v in other.variables} - own


def _values(model: keras.Model, inputs: _Inputs) -> list:
    """Lists the arrays that a call is a function of.

    They are the arguments of the call, as exact as they are known, the values
    of variables, and what layers hold. Under TensorFlow only values with
    gradients have to be among them.
    """
    values = [
        *map(_copied, map(exact_values.before_cast, inputs.given)),
        *(inputs.states[key] for key in inputs.mapped),
    ]
    if _TENSORFLOW:
        known = set(map(id, values))
        held = _held(model, inputs.nest)
        values += [x for x in held if id(x) not in known]
    return values


def _held(model: keras.Model, nest: Any) -> list:
    """Lists further tensors of a call that gradients reach.

    They are attributes of a layer, or of an argument of the user's own class.
    """
    owners = [*layers.flat_layers(model)]
    tensors.map_leaves(nest, owners.append)
    held = [
        item.value
        for item in _items(x for x in owners if not _is_array(x)).values()
        if _is_array(item.value)
        and _is_float(item.value)
        and tapes.reach(item.value)
    ]
    return list({id(value): value for value in held}.values())


def _overwritten(model: keras.Model, inputs: _Inputs) -> set[int]:
    """Returns the `id`s of values whose gradient is their next value."""
    variables = filter(keras_variables.is_overwritten, model.variables)
    return {
        id(inputs.states.get(id(v), keras_variables.local(v.value)))
        for v in variables
    }


def _start(model: keras.Model) -> Callable[[], States]:
    """Returns a function that reads the values of now for a second run.

    That run then draws the same random numbers, and has the same weights. A
    graph needs no second run.
    """
    if not tf.executing_eagerly():
        return dict
    return tapes.reading_again(model.variables)


def _as_function(model: keras.Model, call: Any, inputs: _Inputs) -> Callable:
    """Returns a call as a function of arrays, for a border."""
    # JAX's compiled code holds the function. A strong reference to the model
    # would keep it alive forever.
    model_of, call_of = weakref.ref(model), weakref.WeakMethod(call)

    def function(
        *values: Any, start: Callable[[], States] | None = None
    ) -> tuple[list, list, _Rest]:
        return _run(model_of(), call_of(), inputs, values, start)

    return function


def _run(
    model: Any,
    call: Any,
    inputs: _Inputs,
    values: tuple,
    start: Callable[[], States] | None,
) -> tuple[list, list, _Rest]:
    """Calls a model.

    Args:
        model: The model.
        call: Computes its results.
        inputs: What the call depends on.
        values: Replace what `_values` returned.
        start: Reads the other variables, for a run that must not change
            anything.

    Returns:
        Its float results with what it left on layers, the losses it added, and
        the rest.
    """
    count = len(inputs.given)
    args, kwargs = _with_arrays(inputs.nest, inputs.given, values[:count])
    new_values = values[count : count + len(inputs.mapped)]
    mapped = dict(zip(inputs.mapped, new_values, strict=True))
    states = (start() if start else {}) | inputs.states | mapped
    scope = None
    if start is not None or inputs.collects is not None or not _TENSORFLOW:
        scope = _new_scope(inputs.collects, states)
    with (
        scope or contextlib.nullcontext(),
        global_state.as_called(inputs.context),
    ):
        known = {id(loss) for _, loss in layers.added_losses(model)}
        before = _items(layers.flat_layers(model))
        outputs = call(*args, **kwargs)
        left = _taken_off(model, before)
        added = [
            (layer, loss)
            for layer, loss in layers.added_losses(model)
            if id(loss) not in known
        ]
    after = {} if scope is None else scope.state_mapping
    updates = {
        key: value
        for key, value in after.items()
        if value is not states.get(key)
    }
    arrays = _arrays([outputs, *(item.value for item in left)])
    floats = [x for x in arrays if _is_float(x)]
    others = [x for x in arrays if not _is_float(x)]
    rest = _Rest(others, updates, outputs, left, added)
    return floats, [loss for _, loss in added], rest


def _new_scope(collects: bool | None, states: States) -> keras.StatelessScope:
    scope = keras.StatelessScope(
        collect_losses=collects is not False,
        initialize_variables=False,
    )
    scope.state_mapping = dict(states)
    return scope


def _finished(
    model: keras.Model,
    scope: keras.StatelessScope | None,
    floats: list,
    losses: list,
    rest: _Rest,
) -> Any:
    """Applies the effects of a call, with the arrays of the border.

    Returns:
        The results of the call.
    """
    for (layer, inner), loss in zip(rest.added, losses, strict=True):
        layers.put_loss(layer, inner, loss)
    if scope is not None:
        scope.state_mapping.update(rest.updates)
    for variable in model.variables if scope is None else ():
        if id(variable) in rest.updates:
            variable.assign(rest.updates[id(variable)])
    new, others = iter(floats), iter(rest.others)

    def of_border(array: Any) -> Any:
        return next(new if _is_float(array) else others)

    outputs = _rebuilt(rest.outputs, of_border)
    for item in rest.left:
        item.put(_rebuilt(item.value, of_border))
    return outputs


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

    def put(self, value: Any) -> None:
        """Puts a value in its place; a list may have lost it from its end."""
        if isinstance(self.container, list) and self.key == len(self.container):
            self.container.append(value)
        else:
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


def _taken_off(model: keras.Model, before: Items) -> list[_Item]:
    """Returns what a call left on layers, such as scores for a later loss.

    The earlier attributes are restored, because a border returns its own. It is
    float32, like the results: a loss that casts 16 bits itself would send its
    gradient back through 16 bits before the border scales it.
    """
    after = _items(layers.flat_layers(model), before)
    left = {
        place: item
        for place, item in after.items()
        if not item.is_among(before) and _arrays(item.value)
    }
    # A list loses its new items from its end.
    for place, item in reversed(left.items()):
        if place in before:
            item.put(before[place].value)
        else:
            del item.container[item.key]
    wide = exact_values.to_float32_with_notes
    return [
        item._replace(value=tensors.map_leaves(item.value, wide))
        for item in left.values()
    ]


def _copied(array: Any) -> Any:
    # Tracers of NumPy arrays get copied as well, because `custom_vjp` refuses
    # them under `vmap`. A compiled program has none of these copies.
    return array if _TENSORFLOW else jax.numpy.array(array)


def _with_arrays(nest: Any, given: list, values: Iterable) -> Any:
    """Returns a nest with values in place of the given arrays."""
    pairs = zip(given, values, strict=True)

    def replaced(array: Any) -> Any:
        if not _is_argument(array):
            return array
        before, value = next(pairs)
        if exact_values.before_cast(before) is before:
            return value
        # Exact numbers are rounded here, as they are where the model begins.
        cast = keras.ops.cast(value, before.dtype)
        exact_values.note_cast(before, cast, value)
        return cast

    return _rebuilt(nest, replaced)


def floats(nest: Any) -> tuple[list, Callable[[list], Any]]:
    """Returns a nest's float arrays with what is attached, as a border does.

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
    global_state.copy_notes(
        leaf, new, lambda x: function(x) if _is_array(x) else x
    )
    return new


def _is_argument(array: Any) -> bool:
    return not _TENSORFLOW or _is_float(array)


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
