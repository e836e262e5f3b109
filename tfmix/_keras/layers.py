"""Reads what Keras's layers hold, calls them, and wraps their methods.

The wrappers of a layer's methods are attributes of that layer, so Keras's
classes stay unchanged, and all wrappers of one role are attached and detached
together.
"""

import dataclasses
import functools
import itertools
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import keras
from keras.src.backend.common import (
    masking,
    name_scope,
)
from keras.src.models import functional

from tfmix import _formats
from tfmix._keras import context

# This method runs the time steps of a recurrent layer. Two layers have one of
# their own, which first tries a function of the backend for all steps.
_LOOP = "inner_loop"
LOOPS = tuple(
    (kind, _LOOP)
    for kind in (keras.layers.RNN, keras.layers.LSTM, keras.layers.GRU)
    if _LOOP in vars(kind)
)
# The base class of preprocessing layers; its name changed after Keras 3.12.
DATA_LAYER: type = keras.layers.Rescaling.__bases__[0]
_BROKEN_BY_CASTS = (
    keras.layers.Embedding,
    DATA_LAYER,
    keras.Sequential,
    keras.layers.SpectralNormalization,
    keras.layers.Lambda,
    keras.layers.TFSMLayer,
)
# `Layer.__call__` calls this method first, before it casts inputs. An instance
# attribute of that name hooks one layer and leaves its class alone.
FIRST_CALLED = "_check_super_called"
# Users cannot change the code of these packages.
_LIBRARIES = frozenset("keras tensorflow jax jaxlib numpy tfmix".split())
# tfmix adds only this attribute to a layer.
_MARKS = "_tfmix_marks"
_NOTHING: Mapping = types.MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class Marks:
    """Everything that tfmix stores on one layer.

    Attributes:
        origin: Where its dtype comes from, "" if nothing was noted. See
            `dtype_origin`.
        float8: Why it does not multiply in float8, "" if it does; `None` if
            that has not been decided.
        methods: The owner of the wrapped methods.
    """

    origin: str = ""
    float8: str | None = None
    methods: Any = None


_NO_MARKS = Marks()


def marks(layer: keras.Layer) -> Marks:
    """Returns what tfmix stores on a layer."""
    kept: Marks = vars(layer).get(_MARKS, _NO_MARKS)
    return kept


def mark(layer: keras.Layer, **values: Any) -> None:
    """Changes what tfmix stores on a layer, by the names of `Marks`."""
    kept = dataclasses.replace(marks(layer), **values)
    # Keras tracks what is set on a layer as its state.
    vars(layer)[_MARKS] = kept
    if kept == _NO_MARKS:
        del vars(layer)[_MARKS]


# `dtype_origin` returns one of these, or "" if it does not know.
CODE, DEFAULT, FILE = "code", "default", "file"
# Each configuration of a layer has these, and hardly any line of code all.
_OF_CONFIGURATION = {"name", "trainable", "dtype"}


def dtype_origin(layer: keras.Layer) -> str:
    """Returns where a layer's dtype comes from.

    Returns:
        `CODE` if somebody wrote `dtype="..."`, `DEFAULT` if the layer was made
        without a dtype, `FILE` if it was made from a configuration, which names
        a dtype always. It is "" if that is not known.
    """
    if noted := marks(layer).origin:
        return noted
    # Keras keeps the arguments of the constructor, if all are plain values.
    kept = getattr(layer, "_auto_config", None)
    if kept is None:
        return ""
    return origin_of(kept.config | {"name": layer.name})


def origin_of(arguments: Mapping[str, Any]) -> str:
    """Returns the origin of a dtype, from the arguments of a constructor."""
    dtype = arguments.get("dtype")
    if dtype is None:
        return DEFAULT
    if arguments.keys() >= _OF_CONFIGURATION:
        return FILE
    # An object is mostly the policy of the layer around, handed on.
    return CODE if isinstance(dtype, str) else ""


def is_structure(layer: Any) -> bool:
    """Returns whether a layer only connects others: Sequential, Functional."""
    # A subclass with its own `call` may compute anything.
    own = keras.Sequential.call, functional.Functional.call
    return getattr(type(layer), "call", None) in own


# These end a model in numbers whose small digits count.
_LAST_ACTIVATIONS = ("softmax", "sigmoid", "exponential")


def last_activation(layer: keras.Layer) -> str | None:
    """Returns the name of a softmax, sigmoid or exponential that ends a layer.

    It is `None` for other layers.
    """
    if isinstance(layer, keras.layers.Softmax):
        return "softmax"
    name = getattr(getattr(layer, "activation", None), "__name__", None)
    return name if name in _LAST_ACTIVATIONS else None


def is_graph(layer: Any) -> bool:
    """Returns whether a layer is Functional, without a `call` of its own."""
    return getattr(type(layer), "call", None) is functional.Functional.call


def is_input(layer: Any) -> bool:
    """Returns whether a layer is the `Input` of a graph or Sequential."""
    return isinstance(layer, keras.layers.InputLayer)


def is_builtin(layer: Any) -> bool:
    """Returns whether a layer's class is part of Keras."""
    return type(layer).__module__.split(".")[0] == "keras"


def in_library(module: str) -> bool:
    """Returns whether a module is part of a library, not of the user's code."""
    return module.split(".")[0] in _LIBRARIES


def takes_casts(layer: Any) -> bool:
    """Returns whether casts of a Keras layer's inputs do no harm.

    It is false for layers that run the user's code, such as `Lambda`.
    """
    return is_builtin(layer) and not isinstance(layer, _BROKEN_BY_CASTS)


def inner_operations(layer: Any) -> list:
    """Returns what a layer holds: layers, and the ops of a graph."""
    if isinstance(layer, keras.Sequential):
        return list(layer.layers)
    if is_structure(layer):
        return list(layer.operations)
    return list(getattr(layer, "_layers", []))


def flat_layers(layer: Any) -> list:
    """Returns a layer and all layers inside it, each once, in order."""
    by_id: dict[int, keras.Layer] = {}
    waiting = [layer] if isinstance(layer, keras.Layer) else []
    while waiting:
        outer = waiting.pop()
        if id(outer) not in by_id:
            by_id[id(outer)] = outer
            # Keras's own walk reverses the order inside inner models.
            waiting += reversed(outer._layers)
    return list(by_id.values())


def untrained_variables(model: keras.Model) -> list:
    """Lists the variables of a model that gradients do not update.

    Among them are some that Keras does not list: the states of stateful RNNs,
    and TensorFlow's own variables, in attributes of layers, and in lists and
    dicts there.
    """
    flat = flat_layers(model)
    # Keras's own list takes each layer's from the layers around it.
    listed = {
        id(x): x
        for layer in flat
        for x in (*layer._trainable_variables, *layer._non_trainable_variables)
    }
    all_trained = model.trainable
    found = [x for x in listed.values() if not (all_trained and x.trainable)]
    if keras.backend.backend() != "tensorflow":
        # Keras passes the others to no step that JAX compiles.
        return found
    import tensorflow as tf

    items = held(flat, (keras.Variable, tf.Variable)).values()
    others = {id(x): x for *_, x in items if id(x) not in listed}
    return [*found, *others.values()]


# A container, such as a layer's attributes, the key there, and the value.
Item = tuple[Any, Any, Any]
# Items by the `id` of the container, and the key.
Items = dict[tuple[int, Any], Item]


def held(owners: Iterable, kinds: Any, more: Mapping = _NOTHING) -> Items:
    """Returns values that a user's attributes hold, and what is in these.

    Args:
        owners: Layers and other objects. Their attributes may be lists, tuples
            and dicts of values.
        kinds: The types of the values.
        more: Another container.
    """
    found: Items = {}
    waiting: list[tuple[Any, Sequence]] = [(more, [*more])]
    for owner in owners:
        attributes = getattr(owner, "__dict__", {})
        names = users_attributes(tuple(attributes))
        waiting.append((attributes, names))
    holds = functools.partial(_holds, kinds)
    seen: set[int] = set()
    # The list grows meanwhile.
    for container, keys in waiting:
        of_keys = map(type, map(container.__getitem__, keys))
        for key in itertools.compress(keys, map(holds, of_keys)):
            value = container[key]
            kind: Any = type(value)
            if holds(kind) == "value":
                found[id(container), key] = container, key, value
            elif id(value) not in seen:
                seen.add(id(value))
                is_dict = isinstance(value, dict)
                inner = [*value] if is_dict else range(len(value))
                waiting.append((value, inner))
    return found


# Every call of a model asks this of all attributes.
@functools.cache
def _holds(kinds: Any, kind: Any) -> str | None:
    """Returns what an object of a type is among, or has, if anything."""
    if issubclass(kind, kinds):
        return "value"
    return "items" if issubclass(kind, (list, tuple, dict)) else None


def called(model: keras.Layer) -> list[keras.Layer]:
    """Returns a model and all layers inside it that can be called."""
    return [x for x in flat_layers(model) if not is_input(x)]


def is_built(model: keras.Layer) -> bool:
    """Returns whether a model and all layers inside it are built."""
    return all(layer.built for layer in flat_layers(model))


def own_layers(layer: keras.Layer) -> list[keras.Layer]:
    """Returns the layers that a layer holds directly."""
    return list(layer._layers)


def rematerialize_alike(layer: keras.Layer, other: keras.Layer) -> None:
    """Gives a layer the `keras.RematScope` of another layer."""
    mode = getattr(other, "_remat_mode", None)
    if mode is not None:
        put(layer, "_remat_mode", mode)
        rematerialize_anew(layer)


def rematerialize_anew(layer: keras.Layer) -> None:
    """Makes JAX trace a layer's own `call` again when it recomputes it."""
    # JAX caches the trace of a function, including the tracers around it.
    # Keras's bound method is a new object in each call, but an instance
    # attribute is not.
    if getattr(layer, "_remat_mode", None) is None:
        return
    original = type(layer).rematerialized_call.__get__(layer)

    def rematerialized_call(call: Callable, *args: Any, **kwargs: Any) -> Any:
        def anew(*args: Any, **kwargs: Any) -> Any:
            return call(*args, **kwargs)

        return original(anew, *args, **kwargs)

    put(layer, "rematerialized_call", rematerialized_call)


def attention_sizes(layer: keras.Layer) -> tuple[tuple | None, int | None]:
    """Returns the axes that attention uses, and the width of its values."""
    axes = getattr(layer, "_attention_axes", None)
    return axes, getattr(layer, "_value_dim", None)


def owns_random_numbers(layer: Any) -> bool:
    """Returns whether a layer, or a Keras layer in it, draws random numbers."""
    parts = flat_layers(layer) if is_builtin(layer) else [layer]
    return any(getattr(part, "_seed_generators", None) for part in parts)


def kernel_of(layer: Any) -> keras.Variable | None:
    """Returns the variable of a layer's kernel, if it is built."""
    return getattr(layer, "_kernel", None)


def copy_mask(source: Any, destination: Any) -> None:
    """Copies the mask of one tensor, if it has one, to another."""
    mask = masking.get_keras_mask(source)
    if mask is not None:
        masking.set_keras_mask(destination, mask)


# A layer is asked several times in each call.
@functools.lru_cache(maxsize=1024)
def users_attributes(names: tuple[str, ...]) -> tuple[str, ...]:
    """Lists the attributes of a layer that Keras and TensorFlow have not set.

    Losses that calls have added are among Keras's.
    """
    return tuple(
        name
        for name in names
        if name not in _KERAS_ATTRIBUTES and not name.startswith("_self_")
    )


_KERAS_ATTRIBUTES = frozenset(vars(keras.layers.Layer(name="any")))


def drop_losses(layer: keras.Layer) -> None:
    """Forgets the losses that calls have added to a layer, at any depth."""
    for inner in flat_layers(layer):
        inner._losses.clear()
        inner._loss_ids.clear()


def added_losses(layers: Iterable[keras.Layer]) -> list[tuple]:
    """Lists the losses that calls have added, each with its layer."""
    return [(layer, x) for layer in layers for x in layer._get_own_losses()]


def put_loss(layer: keras.Layer, before: Any, loss: Any) -> None:
    """Replaces a loss that a call has added to a layer."""
    scope: Any = context.open_scope()
    losses = layer._losses if scope is None else scope.losses
    losses[:] = [loss if added is before else added for added in losses]
    if scope is not None:
        layer._loss_ids.discard(id(before))
        layer._loss_ids.add(id(loss))


def that_compute(model: keras.Layer) -> list[keras.Layer]:
    """Lists the layers of a model that compute something, at any depth.

    Functional and Sequential models only connect layers, whatever their own
    dtype policy is; a subclassed model may compute in its `call`.
    """
    flat = flat_layers(model)
    return [x for x in flat if not (is_input(x) or is_structure(x))]


def computes_in(model: keras.Layer, dtype: str) -> bool:
    """Returns whether a layer of a model computes in a dtype."""
    return any(layer.compute_dtype == dtype for layer in that_compute(model))


def has_sixteen_bit_variables(model: keras.Layer) -> bool:
    """Returns whether a model has, or will have, 16-bit variables."""
    return any(
        layer.variable_dtype in _formats.SIXTEEN_BIT
        for layer in that_compute(model)
    )


def put(layer: Any, name: str, value: Any) -> None:
    """Sets an attribute without Keras tracking it as state."""
    object.__setattr__(layer, name, value)


def set_policy(layer: keras.Layer, policy: keras.DTypePolicy) -> None:
    """Sets a layer's policy; Keras's setter would write into a user's map."""
    put(layer, "_dtype_policy", policy)


def own_policy(layer: keras.Layer) -> keras.DTypePolicy:
    """Returns a layer's own policy; Keras's getter may copy a map."""
    policy: keras.DTypePolicy = vars(layer)["_dtype_policy"]
    return policy


def change_policy(layer: keras.Layer, **methods: Callable) -> None:
    """Gives a layer a plain policy of its own with other methods."""
    policy = layer.dtype_policy
    if type(policy) is keras.DTypePolicy:
        own = keras.DTypePolicy(policy.name)
        vars(own).update(methods)
        set_policy(layer, own)


def path_of(layer: keras.Layer) -> str:
    """Returns a layer's path, even before its first call sets it."""
    if layer.path:
        return str(layer.path)
    parent = layer._parent_path
    if parent is None:
        parent = name_scope.current_path()
    return f"{parent}/{layer.name}" if parent else str(layer.name)


def running_path() -> str:
    """Returns the path of the layer whose call is running."""
    return str(name_scope.current_path())


def set_path(layer: keras.Layer, path: str) -> None:
    """Sets the path of a layer."""
    put(layer, "_path", path)


def until_built(layer: keras.Layer, action: Callable) -> None:
    """Runs an action before each use of a layer until it is built."""
    original = getattr(type(layer), FIRST_CALLED)
    busy: list[bool] = []

    def check() -> None:
        original(layer)
        if busy:
            return
        busy.append(True)
        try:
            action(layer)
        finally:
            busy.pop()
        if layer.built and layer._called:
            vars(layer).pop(FIRST_CALLED, None)

    put(layer, FIRST_CALLED, check)


def graph_of(model: keras.Layer) -> keras.Model | None:
    """Returns the Functional model that a built Sequential runs."""
    return getattr(model, "_functional", None)


def results(model: keras.Layer) -> list:
    """Returns the symbolic results of a Functional or Sequential model."""
    graph = graph_of(model) or model
    return keras.tree.flatten(getattr(graph, "outputs", None) or [])


def has_own_step(model: keras.Model) -> bool:
    """Returns whether a model's class defines its own `train_step`."""
    module = type(model).train_step.__module__ or ""
    return module.split(".")[0] != "keras"


def metrics(model: keras.Model) -> list[keras.Metric]:
    """Returns a model's metrics, also those that `compile` has yet to build."""
    given = getattr(model, "_compile_metrics", None)
    if given is None or given.built:
        return list(model.metrics)
    nest = given._user_metrics, given._user_weighted_metrics
    leaves = keras.tree.flatten(nest)
    return [*model.metrics, *(x for x in leaves if isinstance(x, keras.Metric))]


def reported(model: keras.Model) -> list[keras.Variable]:
    """Returns the variables of a model's metrics."""
    return [v for metric in metrics(model) for v in metric.variables]


def adopt_optimizer(model: keras.Model, optimizer: Any, saved: Any) -> None:
    """Sets the optimizer of a compiled model, and the one its files name."""
    model.optimizer = optimizer
    config = getattr(model, "_compile_config", None)
    if config is not None:
        config.config["optimizer"] = saved


# A wrapper gets the wrapped method, then the arguments of the call.
Wrapper = Callable[..., Any]
# The first is the innermost. A layer that falls back to float32 is traced again
# under the policy's rules, and the guard restores what ran under them.
CALL, RULES, GUARD = _ROLES = "call", "rules", "guard"


def argument(
    order: Sequence[str],
    args: Sequence,
    kwargs: Mapping,
    name: str,
    default: Any = None,
) -> Any:
    """Returns an argument of a call, or its default.

    Args:
        order: The names of the arguments in the function of Keras's own. What
            others have put in its place may be a `(*args, **kwargs)`, or name
            only a few.
        args: The positional arguments of the call.
        kwargs: Its keyword arguments.
        name: The argument's name.
        default: The value if the call lacks the argument.
    """
    given = dict(zip(order, args, strict=False))
    return {**kwargs, **given}.get(name, default)


def with_argument(
    order: Sequence[str], args: Sequence, kwargs: Mapping, name: str, value: Any
) -> tuple[tuple, dict]:
    """Returns a call's arguments with one of them changed or added.

    What came by position stays there, and what came by name keeps its name.
    """
    place = order.index(name)
    if place < len(args):
        return (*args[:place], value, *args[place + 1 :]), dict(kwargs)
    return tuple(args), {**kwargs, name: value}


class Wrappers(Protocol):
    """Wrappers that have one role for a layer."""

    @property
    def wrappers(self) -> Mapping[str, Wrapper]:
        """The wrapper of each method, by the method's name."""


def part(layer: keras.Layer, role: str) -> Any:
    """Returns the part that has a role for a layer, or `None`."""
    return by_role(layer).get(role)


def by_role(layer: keras.Layer) -> Mapping[str, Wrappers]:
    """Returns the attached parts by role, for `restore`."""
    owner: _Owner | None = marks(layer).methods
    return {} if owner is None else owner.parts


def attach(layer: keras.Layer, role: str, part: Wrappers) -> None:
    """Attaches a part to a layer, in place of the one that had the role."""
    restore(layer, {**by_role(layer), role: part})


def detach(layer: keras.Layer, role: str) -> None:
    """Detaches the part that has a role, if there is one."""
    restore(layer, {r: part for r, part in by_role(layer).items() if r != role})


def restore(layer: keras.Layer, parts: Mapping[str, Wrappers]) -> None:
    """Attaches exactly these parts."""
    owner = marks(layer).methods or _Owner(layer)
    owner.set(parts)
    mark(layer, methods=owner if parts else None)


class _Owner:
    """Owns the wrapped methods of one layer."""

    def __init__(self, layer: keras.Layer) -> None:
        self.parts: Mapping[str, Wrappers] = {}
        self._layer = layer
        # The attributes on the layer now, and those that the user had set.
        self._installed: dict[str, Callable] = {}
        self._users: dict[str, Callable | None] = {}

    def set(self, parts: Mapping[str, Wrappers]) -> None:
        self.parts = {role: parts[role] for role in _ROLES if role in parts}
        wanted = {name for part in parts.values() for name in part.wrappers}
        for name in set(self._installed) - wanted:
            self._remove(name)
        for name in wanted:
            self._install(name)

    def _install(self, name: str) -> None:
        layer = self._layer
        users = vars(layer).get(name)
        if users is not None and users is self._installed.get(name):
            users = self._users[name]
        # A bound method, whose signature has no `self`.
        of_class = types.MethodType(getattr(type(layer), name), layer)

        @functools.wraps(users or of_class)
        def method(*args: Any, **kwargs: Any) -> Any:
            # Parts, and hooks on the class, change.
            of_class = getattr(type(layer), name)
            call = users or types.MethodType(of_class, layer)
            if self._users.get(name) is users:
                for part in self.parts.values():
                    if name in part.wrappers:
                        call = functools.partial(part.wrappers[name], call)
            # Else the user has wrapped this method, and a newer one wraps that.
            return call(*args, **kwargs)

        # JAX compiles a function object once. A model that is compiled again
        # would go on with its first loss and metrics if this were not new.
        self._installed[name], self._users[name] = method, users
        object.__setattr__(layer, name, method)

    def _remove(self, name: str) -> None:
        method, users = self._installed.pop(name), self._users.pop(name)
        if vars(self._layer).get(name) is not method:
            # Other code has wrapped it since, and has to remove that itself.
            return
        if users is None:
            object.__delattr__(self._layer, name)
        else:
            object.__setattr__(self._layer, name, users)
