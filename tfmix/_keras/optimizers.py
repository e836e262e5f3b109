"""The parts of Keras's optimizers that tfmix reaches into."""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import keras
from keras.src.saving import keras_saveable

from tfmix import _formats
from tfmix._keras import replacing

Optimizer: TypeAlias = keras.optimizers.Optimizer
# Keras wraps optimizers in this class, also if its public name has been given
# to another one, such as tfmix's.
KerasScaler: TypeAlias = keras.optimizers.LossScaleOptimizer
# Every optimizer except a wrapper applies its gradients here.
*_, APPLY = replacing.definers(keras.optimizers.Optimizer, "apply")


def chain(optimizer: Optimizer | None) -> Iterator[Optimizer]:
    """Yields an optimizer and those it wraps, outermost first."""
    while optimizer is not None:
        yield optimizer
        optimizer = getattr(optimizer, "inner_optimizer", None)


def appliers() -> list[type]:
    """Lists the optimizer classes that define an `apply` of their own."""
    found, (base, _) = [], APPLY
    waiting = [base]
    while waiting:
        each = waiting.pop()
        waiting += each.__subclasses__()
        if "apply" in vars(each) and each not in found:
            found.append(each)
    return found


def paths(variables: Sequence) -> list[str]:
    """Returns the paths of variables, or the names of TensorFlow's own."""
    return [getattr(v, "path", v.name) for v in variables]


def with_nested(optimizer: Any) -> Iterator[Optimizer]:
    """Yields a Keras optimizer and all optimizers it holds, outermost first."""
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        return
    yield optimizer
    for value in list(vars(optimizer).values()):
        for held in value if isinstance(value, list | tuple) else [value]:
            if isinstance(held, keras.optimizers.Optimizer):
                yield from with_nested(held)


def workers(optimizer: Optimizer) -> list[Optimizer]:
    """Returns the optimizers of a `MultiOptimizer`, or the one given."""
    return getattr(optimizer, "optimizers", [optimizer])


# Returns an optimizer's key for a variable, or for a replica's copy of one. The
# method does not use `self`.
key: Callable[[Any], Any] = functools.partial(
    keras.optimizers.Optimizer._var_key, None
)


def add_variable(optimizer: Optimizer, **settings: Any) -> keras.Variable:
    """Adds a variable whose first value is read from the model's."""
    # Keras 3.16 creates it outside the function that TensorFlow traces, where
    # the model's variable may have no value yet. Its base class does not.
    base, _ = APPLY
    return base.add_variable(optimizer, **settings)


def own_variables(optimizer: Optimizer) -> list[keras.Variable]:
    """Returns a wrapper's variables without the inner optimizer's."""
    return list(optimizer._variables)


def remember(optimizer: Optimizer, variables: list[keras.Variable]) -> None:
    """Gives a wrapper the model's variables, without tracking them."""
    vars(optimizer)["_trainable_variables"] = variables
    vars(optimizer)["_trainable_variables_indices"] = {
        key(variable): index for index, variable in enumerate(variables)
    }


def remembered(optimizer: Optimizer) -> list[keras.Variable]:
    """Returns the variables that an optimizer was built with."""
    return list(optimizer._trainable_variables)


def recognised(optimizer: Optimizer, variables: Sequence) -> list:
    """Returns the built variables that these stand for, or raises an error."""
    optimizer._check_variables_are_known(variables)
    known = optimizer._trainable_variables
    return [known[optimizer._get_variable_index(v)] for v in variables]


def positions(optimizer: Optimizer, variables: Sequence) -> list[int]:
    """Returns the positions of variables among those of the build."""
    places = optimizer._trainable_variables_indices
    return [places[key(variable)] for variable in variables]


@contextlib.contextmanager
def without_reduction(
    optimizer: Optimizer | None, strategy: Any = None
) -> Iterator[None]:
    """Stops an optimizer, and all in it, from summing over replicas."""
    # A strategy replaces the one that the optimizer has.
    with contextlib.ExitStack() as undo:
        for part in with_nested(optimizer):
            # This saves an operation per gradient if there is no strategy.
            replaced = {"_all_reduce_sum_gradients": list}
            if strategy is not None:
                replaced["_distribution_strategy"] = strategy
            for name, value in replaced.items():
                replacing.swap(undo, part, name, value)
        yield


class Saveable(keras_saveable.KerasSaveable):
    """A part of an optimizer that Keras's files hold beside its variables."""

    def _obj_type(self) -> str:
        return "Optimizer"


def expect_no_state(optimizer: Optimizer) -> None:
    """Keeps Keras silent if the file has no place for an optimizer's state."""

    def load(store: Any) -> None:
        del vars(optimizer)["load_own_variables"]
        if store.keys():
            optimizer.load_own_variables(store)

    vars(optimizer)["load_own_variables"] = load


class OverwritesThroughInner:
    """Mixin: overwrites variables as the inner optimizer does."""

    inner_optimizer: Optimizer

    def _overwrite_variable_with_gradient(self, variable: Any) -> Any:
        return self.inner_optimizer._overwrite_variable_with_gradient(variable)


def count_as_tracked(optimizer: Optimizer, variable: keras.Variable) -> None:
    """Keeps an optimizer from saving a variable as one of its own."""
    optimizer._tracker.stored_ids["variables"].add(id(variable))


def applies(optimizer: Optimizer) -> keras.Variable:
    """Returns the counter of `apply` calls of the innermost optimizer.

    With gradient accumulation, `iterations` is not a variable and counts
    updates.
    """
    *_, innermost = chain(optimizer)
    return innermost._iterations


def undecayed(optimizer: Optimizer, variables: Sequence) -> list:
    """Returns the variables that an optimizer's weight decay leaves out."""
    # Keras 3.16 decides in `build`; earlier versions use another name.
    excluded = getattr(optimizer, "_is_excluded_from_weight_decay", None)
    if excluded is not None:
        return [v for v in variables if excluded(v)]
    return [v for v in variables if not optimizer._use_weight_decay(v)]


def averages(optimizer: Optimizer) -> list[tuple[Any, Any]]:
    """Returns the variables that a built optimizer updates, with averages."""
    return [
        pair
        for worker in workers(optimizer)
        if worker.use_ema
        for pair in zip(
            worker._trainable_variables,
            worker._model_variables_moving_average,
            strict=True,
        )
        if pair[1] is not None
    ]


class AveragesOfInner:
    """Mixin: Keras's `SwapEMAWeights` finds the inner optimizer's averages."""

    inner_optimizer: Optimizer

    @property
    def _model_variables_moving_average(self) -> Any:
        averages = self.inner_optimizer._model_variables_moving_average
        for variable in remembered(self):
            dtype = keras.backend.standardize_dtype(variable.dtype)
            if dtype in _formats.SIXTEEN_BIT:
                raise ValueError(
                    "SwapEMAWeights cannot swap averages, which are float32, "
                    f"with 16-bit weights. Received: variable {variable.path!r}"
                    f" of dtype {dtype!r}. Leave out the callback: "
                    "after `fit` the model holds the averages. Or take a "
                    "'mixed_' policy, whose weights are float32."
                )
        return averages


# What TensorFlow's files hold of a wrapper.
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
        # An optimizer of masters is a wrapper, too, and stays what is inside.
        passed = inner.keys() - {*_AMBIGUOUS, _INNER}
        # TensorFlow restores in this order. What Keras's scaler would take for
        # a variable of its own has to be the inner optimizer's by then.
        return {
            _INNER: self.inner_optimizer,
            **own,
            **{name: inner[name] for name in inner if name in passed},
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
