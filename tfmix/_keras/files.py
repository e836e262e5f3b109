"""What files hold of our objects: checkpoints, SavedModels, Keras's own."""

import contextlib
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras.src.saving import serialization_lib

from tfmix._keras import variables as keras_variables

_INNER = "inner_optimizer"
# Every optimizer has these. Keras's scaler does not use its own, so in a
# wrapper's place these names would mean two things; `_variables` has them, too.
_AMBIGUOUS = ("_iterations", "_learning_rate")
# Keras's scaler has as many variables of its own, by position.
_KERAS_OWN = 4
# SGD sets it twice, so TensorFlow, which restores a variable when it is made,
# finds these by position only.
_ONLY_BY_POSITION = ("_variables", "momentums")
_TRACKABLE: Any = object


class StoredAsInner(_TRACKABLE):
    """Mixin: TensorFlow stores a wrapper in the place of its inner optimizer.

    In the object graph of a checkpoint the wrapper has the children of the
    inner optimizer, where a run without the wrapper finds them. Beside these it
    has those of Keras's scaler: `inner_optimizer`, and variables of its own.

    Of a file it reads these, if there is an `inner_optimizer`. Otherwise the
    file is that of a bare optimizer, and all of it is the inner one's.
    """

    inner_optimizer: keras.optimizers.Optimizer

    def _trackable_children(
        self, save_type: str = "checkpoint", **kwargs: Any
    ) -> dict[str, Any]:
        children = super()._trackable_children(save_type, **kwargs)
        if save_type != "checkpoint":
            return children
        own = self._own_children()
        for file in self._stored.files:
            # What a file has no place for keeps its value, and counts as
            # matched: the model and its optimizer are.
            for name, variable in own.items():
                file.object_by_proto_id[id(self), name] = variable
        inner = self.inner_optimizer._trackable_children(save_type, **kwargs)
        # TensorFlow restores in this order. What Keras's scaler would take for
        # a variable of its own has to be the inner optimizer's by then.
        return {
            _INNER: self.inner_optimizer,
            **own,
            **{name: inner[name] for name in inner if name not in _AMBIGUOUS},
            "_variables": self._by_position(inner),
        }

    def _lookup_dependency(
        self, name: str, cached_dependencies: dict | None = None
    ) -> Any:
        if cached_dependencies is None:
            return super()._lookup_dependency(name)
        # A file is being read.
        own = {_INNER: self.inner_optimizer, **self._own_children()}
        return own.get(name)

    @property
    def _deferred_dependencies(self) -> Any:
        waiting = super()._deferred_dependencies
        return _Unplaced(self, waiting, self._stored.files)

    @functools.cached_property
    def _stored(self) -> "_Stored":
        return _Stored()

    def _own_children(self) -> dict[str, Any]:
        """Returns the variables that this wrapper uses, by attribute."""
        return {
            name: child
            for name, child in self._unconditional_dependency_names.items()
            if isinstance(child, keras.Variable) and name not in _AMBIGUOUS
        }

    def _by_position(self, inner: dict) -> Any:
        """Returns the inner optimizer's variables by position.

        Those in the places of the variables of Keras's scaler are left out if
        they have another name.
        """
        import tensorflow as tf

        named = {
            id(variable)
            for name, child in inner.items()
            if name not in _ONLY_BY_POSITION
            for variable in child._trackable_children().values()
        }
        found = {
            str(position): variable
            for position, variable in enumerate(self.inner_optimizer.variables)
            if position >= _KERAS_OWN or id(variable) not in named
        }
        # TensorFlow asks several times while it saves, and compares objects.
        kept = self._stored.by_position
        if [*map(id, kept.values())] != [*map(id, found.values())]:
            kept = self._stored.by_position = tf.__internal__.tracking.wrap(
                found
            )
        return kept


class _Stored:
    """What TensorFlow's files need of a wrapper from one call to the next."""

    def __init__(self) -> None:
        self.files: weakref.WeakSet = weakref.WeakSet()
        self.by_position: Any = {}


class _Unplaced:
    """What a file has in a wrapper's place, and the wrapper has not (yet)."""

    def __init__(
        self, wrapper: Any, waiting: dict, files: weakref.WeakSet
    ) -> None:
        self.wrapper, self.waiting, self.files = wrapper, waiting, files
        self.get, self.pop = waiting.get, waiting.pop

    def setdefault(self, name: str, default: list) -> "_Unplaced":
        self.name = name
        return self

    def append(self, position: Any) -> None:
        """Keeps a position of the file, or hands all over to the inner one."""
        file = position.checkpoint
        self.files.add(file)
        nodes = [
            node
            for node, bound in file.object_by_proto_id.items()
            if bound is self.wrapper
        ]
        names = [
            child.local_name
            for node in nodes
            for child in file.object_graph_proto.nodes[node].children
        ]
        if _INNER not in names:
            for node in nodes:
                del file.object_by_proto_id[node]
                place = position.create_child_position(node)
                place.restore(self.wrapper.inner_optimizer)
        elif position.is_simple_variable():
            unused = self.wrapper._unconditional_dependency_names.get(self.name)
            if unused is not None:
                position.restore(unused)
            else:
                self.waiting.setdefault(self.name, []).append(position)


# This method lists what an object holds, for a SavedModel or a checkpoint.
CHILDREN = "_trackable_children"


def children(
    original: Callable,
    variables: Callable[[], Sequence],
    save_type: str = "checkpoint",
    **kwargs: Any,
) -> dict[str, Any]:
    """Returns what an object holds; in a SavedModel also some variables.

    Args:
        original: The object's own `_trackable_children`.
        variables: Returns the variables.
        save_type: What is written: `"checkpoint"` or `"savedmodel"`.
        **kwargs: Further arguments of the method.
    """
    held: dict[str, Any] = original(save_type, **kwargs)
    if save_type != "savedmodel":
        return held
    more = map(keras_variables.backend_variable, variables())
    # Other parts of the object may have added theirs.
    return held | {f"tfmix_{n}": each for n, each in enumerate(more, len(held))}


def save_with(owner: Any, variables: Sequence[keras.Variable]) -> None:
    """Saves variables in the SavedModels that an object is part of."""
    own = getattr(owner, CHILDREN)
    held = functools.partial(children, own, lambda: variables)
    object.__setattr__(owner, CHILDREN, held)


def trusting() -> contextlib.AbstractContextManager:
    """Lets Lambda layers load, because the code is the caller's own."""
    return serialization_lib.SafeModeScope(False)
