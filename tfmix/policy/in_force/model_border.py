"""A float16 model has true gradients: a border stands around its calls."""

from collections.abc import Callable, Iterable
from typing import Any

import keras

from tfmix._keras import compilation, global_state, layers
from tfmix.policy.in_force import (
    softmax_logits,
    suited_optimizer,
    tensors,
    uncast_inputs,
)

_TENSORFLOW = keras.backend.backend() == "tensorflow"
if _TENSORFLOW:
    import tensorflow as tf

    from tfmix.scaling.border import tensorflow_border
else:
    import jax
    import numpy as np

    from tfmix.scaling.border import jax_border

# What Keras and tfmix attach to a result, which a loss takes beside it.
_ATTACHED = ("_keras_logits", "_keras_mask", softmax_logits.LOGITS)


def call_inside(
    model: keras.Model, call: Callable, args: tuple, kwargs: dict
) -> Any:
    """Calls a model, inside a border if it computes in float16.

    Args:
        model: The model, which no other carried one has called.
        call: What computes its results, in float32.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.

    Returns:
        What `call` returns, as tensors of the same values.
    """
    if not suited_optimizer.computes_in(model, "float16"):
        return call(*args, **kwargs)
    run = _on_tensorflow if _TENSORFLOW else _on_jax
    return run(model, call, args, kwargs)


def _on_tensorflow(
    model: keras.Model, call: Callable, args: tuple, kwargs: dict
) -> Any:
    if tf.executing_eagerly() and not compilation.is_recorded():
        return call(*args, **kwargs)
    given = [x for x in _arrays((args, kwargs)) if _is_float(x)]
    # What a second run starts from, so that it draws the same numbers.
    states = [(v, tf.identity(v.value)) for v in model.non_trainable_variables]
    first: list[tuple[Any, list]] = []

    def run(*values: Any) -> tuple[list, list]:
        inside = _inside((args, kwargs), given, values)
        known = {id(loss) for _, loss in layers.added_losses(model)}
        outputs = call(*inside[0], **inside[1])
        added = [
            (layer, loss)
            for layer, loss in layers.added_losses(model)
            if id(loss) not in known
        ]
        first.append((outputs, added))
        floats = [x for x in _arrays(outputs) if _is_float(x)]
        return floats, [loss for _, loss in added]

    def run_again(*values: Any) -> tuple[list, list]:
        with keras.StatelessScope(states, collect_losses=True):
            return run(*values)

    exact = [*map(uncast_inputs.uncast, given)]
    floats, losses = tensorflow_border.call(run, exact, again=run_again)
    outputs, added = first[0]
    for (layer, inner), loss in zip(added, losses, strict=True):
        layers.replace_loss(layer, inner, loss)
    new = iter(floats)
    return _rebuilt(outputs, lambda x: next(new) if _is_float(x) else x)


def _on_jax(
    model: keras.Model, call: Callable, args: tuple, kwargs: dict
) -> Any:
    given = _arrays((args, kwargs))
    scope = global_state.open_scope()
    states = {} if scope is None else dict(scope.state_mapping)
    values = [*map(uncast_inputs.uncast, given), *states.values()]
    # One that is not built makes its variables in the call.
    if not layers.is_built(model) or not any(
        map(compilation.is_symbolic, values)
    ):
        return call(*args, **kwargs)
    first: list[tuple[Any, list]] = []

    def run(*values: Any) -> jax_border.Results:
        inside = _inside((args, kwargs), given, values[: len(given)])
        before = dict(zip(states, values[len(given) :], strict=True))
        with _scope_like(scope, before) as own:
            outputs = call(*inside[0], **inside[1])
            added = layers.added_losses(model)
        updates = {
            key: value
            for key, value in own.state_mapping.items()
            if value is not before.get(key)
        }
        first.append((outputs, [layer for layer, _ in added]))
        arrays = _arrays(outputs)
        floats = [x for x in arrays if _is_float(x)]
        others = [x for x in arrays if not _is_float(x)]
        return floats, [loss for _, loss in added], (others, updates)

    floats, losses, (others, updates) = jax_border.call(run, values)
    outputs, added = first[0]
    for layer, loss in zip(added, losses, strict=True):
        layers.add_loss(layer, loss)
    _update(model, scope, updates)
    new, rest = iter(floats), iter(others)
    return _rebuilt(outputs, lambda x: next(new if _is_float(x) else rest))


def _scope_like(
    scope: keras.StatelessScope | None, states: dict
) -> keras.StatelessScope:
    """Returns a scope of the same kind in which variables have other values."""
    own = keras.StatelessScope(
        collect_losses=scope is None or scope.collect_losses,
        initialize_variables=False,
    )
    own.state_mapping = dict(states)
    return own


def _update(
    model: keras.Model, scope: keras.StatelessScope | None, updates: dict
) -> None:
    """Assigns what was assigned in a scope of the border's own."""
    if scope is not None:
        scope.state_mapping.update(updates)
        return
    for variable in model.variables:
        if id(variable) in updates:
            variable.assign(updates[id(variable)])


def _inside(nest: Any, given: list, values: Iterable) -> Any:
    """Returns a call's arguments with values in the place of those given."""
    new = iter(values)
    pairs = iter(given)

    def replaced(array: Any) -> Any:
        if _TENSORFLOW and not _is_float(array):
            return array
        value, before = next(new), next(pairs)
        if value.dtype == before.dtype:
            return value
        # Exact numbers, rounded here as they were at the model's door.
        cast = keras.ops.cast(value, before.dtype)
        uncast_inputs.note_uncast(before, cast, value)
        return cast

    return _rebuilt(nest, replaced)


def _arrays(nest: Any) -> list:
    """Lists the dense arrays of a nest, and what is attached to each."""
    found: list = []

    def noted(array: Any) -> Any:
        found.append(array)
        return array

    _rebuilt(nest, noted)
    return found


def _rebuilt(nest: Any, function: Callable[[Any], Any]) -> Any:
    """Applies a function to the arrays of a nest and what is attached."""

    def of_leaf(leaf: Any) -> Any:
        if not _is_array(leaf):
            return leaf
        new = function(leaf)
        for name in _ATTACHED:
            value = global_state.note(leaf, name)
            if value is not None:
                value = keras.tree.map_structure(
                    lambda one: function(one) if _is_array(one) else one, value
                )
                if new is not leaf:
                    global_state.put_note(new, name, value)
        return new

    return tensors.map_leaves(nest, of_leaf)


def _is_array(value: Any) -> bool:
    if _TENSORFLOW:
        return isinstance(value, tf.Tensor)
    return isinstance(value, jax.Array | np.ndarray)


def _is_float(array: Any) -> bool:
    dtype = keras.backend.standardize_dtype(array.dtype)
    return bool(keras.backend.is_float_dtype(dtype))
