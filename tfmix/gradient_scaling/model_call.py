"""Calls a model, whose outermost call returns float32.

`Calls.run` reads downwards: it keeps statistics finite, then come the gates,
which scale gradients inside a float16 model, then the policy's rules, then the
model's own `call`. Weights and inputs pass the first gate. Everything that a
gradient can enter by passes the second: results, added losses, and tensors that
a layer keeps for a later loss.

A graph with several results runs in parts, each with gates of its own. A part
holds the operations that reach the same results: the trunk is one part, and
each head another. Each head finds its own power of two, so gradients are right
even if losses differ by orders of magnitude. A part also ends at a result that
others are computed from, such as the mean beside a sample, so that gradients
with respect to it exist.
"""

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras

from tfmix._keras import context, graphs, layers, tapes
from tfmix._keras import variables as keras_variables
from tfmix.loss_scaling import state as optimizer_state
from tfmix.ops import tensors
from tfmix.step import guard

gates: Any
_TENSORFLOW = keras.backend.backend() == "tensorflow"
if _TENSORFLOW:
    from tfmix.gradient_scaling import gates_tensorflow

    gates = gates_tensorflow
else:
    from tfmix.gradient_scaling import gates_jax

    gates = gates_jax

# What a model call is part of, while its results stay in their own dtype.
_AS_MADE = "as made"
# Models that scale their gradients inside.
_scaling: weakref.WeakSet[keras.Model] = weakref.WeakSet()
_NOTHING = (None,)
# A call may read and leave these. What is in a tuple cannot be replaced.
_KEPT = tuple, tensors.ARRAYS


def outputs_as_made() -> contextlib.AbstractContextManager[None]:
    """Makes models return their last layers' results unchanged, for `check`."""
    return context.holding(around=_AS_MADE)


def is_outermost(model: keras.Model) -> bool:
    """Returns whether a model's results leave the 16-bit layers.

    The call must have real tensors, and come from no layer except a graph that
    only connects layers.
    """
    is_part = context.block.get().around is not None
    if is_part or context.on_shapes_only():
        return False
    entry = context.entry_layer()
    if entry is None or entry is model:
        return True
    return layers.is_structure(entry) and not layers.by_role(entry)


class Calls:
    """The calls of one model.

    Args:
        model: The model.
        ruled: Returns a context in which the model's rules hold, and settings
            of a `context.Block` that it is given.
    """

    def __init__(self, model: keras.Model, ruled: Callable) -> None:
        self._model, self._ruled = model, ruled

    @functools.cached_property
    def parts(self) -> list[keras.Function]:
        """The parts of a graph that scale separately, if there are some."""
        model = self._model
        if not layers.is_graph(model) or len(layers.results(model)) == 1:
            return []
        made = graphs.parts(model)
        return made if len(made) > 1 else []

    def run(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        """Calls the model by its own `call`. An outermost call returns float32.

        To the model's layers it is no user's code.
        """
        model = self._model
        if not is_outermost(model):
            with self._ruled(around=_AS_MADE, users_code=""):
                return original(*args, **kwargs)
        call = functools.partial(self._in_float32, original)
        with guard.statistics_kept_finite(model, kwargs.get("training")):
            if self.parts:
                # Each part has gates of its own.
                return call(*args, **kwargs)
            return between_gates(model, call, args, kwargs)

    def run_graph(
        self,
        original: Callable,
        inputs: Any,
        operation_fn: Callable = lambda operation: operation,
        **kwargs: Any,
    ) -> Any:
        """Runs the graph in parts; `original` is Keras's method."""
        # Only the outermost graph does.
        if context.block.get().around is not self:
            return original(inputs, operation_fn=operation_fn, **kwargs)
        model, given = self._model, keras.tree.flatten(inputs)
        # Maps the `id` of a symbol to its value and original dtype. Other parts
        # get the value in float32.
        known = {
            id(symbol): (value, "")
            for symbol, value in zip(model.inputs, given, strict=True)
        }
        for part in self.parts:
            taken = [known[id(symbol)] for symbol in part.inputs]
            run, arguments = functools.partial(_run_part, part), (taken,)
            kwargs = {"operation_fn": operation_fn}
            made = between_gates(model, run, arguments, kwargs)
            known.update(zip(map(id, part.outputs), made, strict=True))
        made = [_narrow(*known[id(symbol)]) for symbol in layers.results(model)]
        return graphs.packed_results(model, made)

    def _in_float32(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        """Calls the model under its rules. Its results are float32."""
        around = self if self.parts else _AS_MADE
        with self._ruled(around=around, users_code=""):
            outputs = original(*args, **kwargs)
            # Under the rules, a cast returns the value from before rounding.
            wide = tensors.to_float32_with_notes
            return tensors.map_leaves(outputs, wide)


def _run_part(part: keras.Function, taken: list, operation_fn: Callable) -> Any:
    """Returns a part's results in float32, each with its own dtype.

    Args:
        part: The part.
        taken: Pairs of a tensor and its original dtype.
        operation_fn: Gives an operation its arguments.
    """
    given = [_narrow(*pair) for pair in taken]
    return [
        (tensors.to_float32_with_notes(x), tensors.float_dtype(x))
        for x in graphs.run_part(part, given, operation_fn)
    ]


def _narrow(tensor: Any, dtype: str) -> Any:
    if tensors.float_dtype(tensor) in ("", "sparse", dtype) or not dtype:
        return tensor
    narrow = keras.ops.cast(tensor, dtype)
    tensors.noted_copy(tensor, narrow, is_weight=False)
    return tensors.copy_notes(tensor, narrow)


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
    are_held = held.issuperset(map(id, variables))
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
    if not (layers.computes_in(model, "float16") and tapes.may_be_asked()):
        return call(*args, **kwargs)
    nest = tensors.map_leaves((args, kwargs), keras_variables.read)
    given, rebuilt = tensors.floats(nest)
    exact = [*map(tensors.before_cast, given)]
    scope = context.open_scope()
    state: dict = {} if scope is None else scope.state_mapping
    weights = [] if _TENSORFLOW or scope else _traced(model)
    values = [*exact, *state.values(), *(value for *_, value in weights)]
    if not (_TENSORFLOW or any(map(context.is_symbolic, values))):
        return call(*args, **kwargs)
    leaves = keras.tree.flatten(nest)
    objects = [x for x in leaves if not isinstance(x, tensors.ARRAYS)]
    flat = layers.flat_layers(model)
    before = layers.held([*flat, *objects], _KEPT, state)
    held = [*_reached([*before.values()], values), *weights]
    place = optimizer_state.place_of(model)
    pair = gates.Gates(place, _overwritten(flat, state))
    kept, with_kept = tensors.floats([value for *_, value in held])
    inside = pair.enter([*exact, *kept])
    new = map(_rounded, given, exact, inside)
    known = layers.added_losses(flat)
    with pair.opened():
        args, kwargs = rebuilt([*new])
        with _replaced(held, with_kept(inside[len(exact) :])):
            outputs = call(*args, **kwargs)
        # An unbuilt model has new layers.
        flat = layers.flat_layers(model)
        after = layers.held([*flat, *objects], _KEPT, state)
        left = _left(after, before)
        # It is float32, like the results: a loss that casts 16 bits itself
        # would send its gradient back through 16 bits before a gate scales it.
        wide = tensors.to_float32_with_notes
        kept = [
            value if container is state else tensors.map_leaves(value, wide)
            for container, _, value in left
        ]
    added = [
        (layer, loss)
        for layer, loss in layers.added_losses(flat)
        if all(loss is not other for _, other in known)
    ]
    passing, rebuilt = tensors.floats((outputs, kept))
    results, losses = pair.leave(passing, [loss for _, loss in added])
    outputs, kept = rebuilt(results)
    for (container, key, _), value in zip(left, kept, strict=True):
        container[key] = value
    for (layer, inner), loss in zip(added, losses, strict=True):
        layers.put_loss(layer, inner, loss)
    return outputs


@contextlib.contextmanager
def _replaced(items: list[layers.Item], values: Iterable) -> Iterator[None]:
    """Puts other values in place of items in a block.

    Values that the block itself puts there stay.
    """
    new = [*values]
    for (container, key, _), value in zip(items, new, strict=True):
        container[key] = value
    try:
        yield
    finally:
        for (container, key, before), value in zip(items, new, strict=True):
            is_list = isinstance(container, list)
            keys = range(len(container)) if is_list else container
            if key in keys and container[key] is value:
                container[key] = before


def _reached(items: list[layers.Item], others: list) -> Iterator[layers.Item]:
    """Returns what a call may read that gradients of the call reach."""
    arrays = [_floats(value) for *_, value in items]
    if _TENSORFLOW:
        reached = [any(map(tapes.reach, each)) for each in arrays]
    else:
        # Layers may keep arrays of a transformation that has ended.
        reached = context.traced_with(others, arrays)
    return itertools.compress(items, reached)


def _floats(value: Any) -> list:
    # Most are weights. What is attached to an array is reached as it is.
    kind: Any = type(value)
    if keras_variables.derives(kind, tensors.ARRAYS):
        return [value] if tensors.known_dtype(kind, value.dtype) else []
    return tensors.floats(value)[0]


def _traced(model: keras.Model) -> list[layers.Item]:
    """Lists weights that JAX traces although no scope holds them.

    Code may have assigned the tracers.
    """
    own = map(keras_variables.own_trainable, layers.flat_layers(model))
    items = map(keras_variables.place_of_value, itertools.chain(*own))
    return [item for item in items if context.is_symbolic(item[-1])]


def _overwritten(flat: list, states: dict[int, Any]) -> set[int]:
    """Returns the `id`s of values whose gradient is their next value."""
    own = itertools.chain(*map(keras_variables.own_variables, flat))
    variables = filter(keras_variables.is_overwritten, own)
    return {
        id(states.get(id(v), keras_variables.local(v.value))) for v in variables
    }


def _left(after: layers.Items, before: layers.Items) -> list[layers.Item]:
    """Lists what a call left, such as scores for a later loss."""
    return [
        item
        for place, item in after.items()
        if before.get(place, _NOTHING)[-1] is not item[-1] and _floats(item[-1])
    ]


def _rounded(array: Any, exact: Any, value: Any) -> Any:
    """Returns an input of the code inside.

    Args:
        array: The caller's array.
        exact: What it was before a layer cast it.
        value: That inside. It is rounded here, as it is where the model begins.
    """
    if exact is array:
        return value
    cast = keras.ops.cast(value, array.dtype)
    tensors.note_cast(array, cast, value)
    return cast
