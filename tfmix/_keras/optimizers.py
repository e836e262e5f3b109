"""The parts of Keras's optimizers that tfmix reaches into."""

import contextlib
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import keras

from tfmix._keras import compilation, replacements

Optimizer: TypeAlias = keras.optimizers.Optimizer
# Where every optimizer but a wrapper applies its gradients.
APPLY: replacements.Place = (
    next(c for c in keras.optimizers.Optimizer.__mro__ if "apply" in vars(c)),
    "apply",
)

_WRAPPED = "_tfmix_wrapped"


def chain(optimizer: Optimizer | None) -> Iterator[Optimizer]:
    """Yields an optimizer and those it wraps, outermost first."""
    while optimizer is not None:
        yield optimizer
        optimizer = getattr(optimizer, "inner_optimizer", None)


def paths(variables: Sequence) -> list[str]:
    """Returns the paths of variables, of TensorFlow's own the names."""
    return [getattr(v, "path", v.name) for v in variables]


def with_nested(optimizer: Any) -> Iterator[Optimizer]:
    """Yields an optimizer of Keras's and all that it holds, outermost first."""
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        return
    yield optimizer
    for value in list(vars(optimizer).values()):
        for held in value if isinstance(value, list | tuple) else [value]:
            yield from with_nested(held)


def unwrapped(optimizer: Any) -> list[Optimizer]:
    """Returns an optimizer and all that it holds, without those around one."""
    return [
        part
        for part in with_nested(optimizer)
        if "inner_optimizer" not in vars(part)
    ]


def is_wrapped(optimizer: Optimizer) -> bool:
    """Says whether a wrapper of tfmix's decides when an optimizer steps."""
    return bool(vars(optimizer).get(_WRAPPED))


def mark_wrapped(optimizer: Optimizer, wrapped: bool = True) -> None:
    """Notes on an optimizer whether a wrapper of tfmix's is around it."""
    # Not by `setattr`, which tracks.
    vars(optimizer)[_WRAPPED] = wrapped


def workers(optimizer: Optimizer) -> list[Optimizer]:
    """Returns the optimizers of a `MultiOptimizer`, or the one given."""
    return getattr(optimizer, "optimizers", [optimizer])


def divides_gradients(optimizer: Optimizer) -> bool:
    """Says whether an update divides a gradient by a tensor of its shape.

    Keras divides a sparse one in a branch of a conditional.
    """
    kinds = keras.optimizers.RMSprop, keras.optimizers.Adadelta
    return any(isinstance(part, kinds) for part in with_nested(optimizer))


def key(variable: Any) -> Any:
    """Returns an optimizer's key for a variable or a replica's copy of it."""
    # It reads nothing of the optimizer.
    return keras.optimizers.Optimizer._var_key(None, variable)


def add_variable(optimizer: Optimizer, **settings: Any) -> keras.Variable:
    """Adds a variable whose first value is read from the model's."""
    # Keras 3.16 makes it outside of the function that TensorFlow traces, where
    # the model's may have no value yet, unless its base class is asked.
    base, _ = APPLY
    return base.add_variable(optimizer, **settings)


def own_variables(optimizer: Optimizer) -> list[keras.Variable]:
    """Returns a wrapper's variables without the inner optimizer's."""
    return list(optimizer._variables)


def remember(optimizer: Optimizer, variables: list[keras.Variable]) -> None:
    """Lets a wrapper know the model's variables, without tracking them."""
    vars(optimizer)["_trainable_variables"] = variables
    vars(optimizer)["_trainable_variables_indices"] = {
        key(variable): index for index, variable in enumerate(variables)
    }


def remembered(optimizer: Optimizer) -> list[keras.Variable]:
    """Returns the variables that an optimizer was built with."""
    return list(optimizer._trainable_variables)


def recognised(optimizer: Optimizer, variables: Sequence) -> list:
    """Returns the variables of the build that others stand for, or raises."""
    optimizer._check_variables_are_known(variables)
    known = optimizer._trainable_variables
    return [known[optimizer._get_variable_index(v)] for v in variables]


def positions(optimizer: Optimizer, variables: Sequence) -> list[int]:
    """Returns the places of variables among those of the build."""
    places = optimizer._trainable_variables_indices
    return [places[key(variable)] for variable in variables]


@contextlib.contextmanager
def alone(optimizer: Optimizer | None, strategy: Any = None) -> Iterator[None]:
    """Lets an optimizer, and all in it, sum no gradients over replicas."""
    # A strategy takes the place of its own.
    with contextlib.ExitStack() as undo:
        for part in with_nested(optimizer):
            # Without a strategy this saves an operation for each gradient.
            replaced = {"_all_reduce_sum_gradients": list}
            if strategy is not None:
                replaced["_distribution_strategy"] = strategy
            for name, value in replaced.items():
                replacements.swap(undo, part, name, value)
        yield


class Selection:
    """Lets an optimizer assign new values or keep the old, by a condition.

    Each is selected where the optimizer assigns it, so that what it computes
    from it next reads what was selected. Selected at the end alone, old and
    new are needed at once, and XLA copies slots on a CPU.

    Args:
        condition: Boolean scalar tensor.
        variables: The variables that the optimizer may change.
    """

    def __init__(self, condition: Any, variables: Sequence) -> None:
        self._condition = condition
        # How each stands as long as nobody else has written it.
        self._marks = {_place(v): compilation.mark(v) for v in variables}

    def is_made(self, variable: Any) -> bool:
        """Says whether all that was assigned to a variable was selected."""
        # A view is not known: what it stores in is, and is restored.
        mark = self._marks.get(_place(variable))
        if mark is None:
            return False
        return bool(_is_same(mark, compilation.mark(variable)))

    @contextlib.contextmanager
    def of(self, optimizer: Optimizer) -> Iterator[None]:
        """Selects what an optimizer, and all in it, assigns in a block."""
        operations = {
            "assign_add": keras.ops.add,
            "assign_sub": keras.ops.subtract,
            "assign": lambda old, new: new,
        }
        with contextlib.ExitStack() as undo:
            for part in with_nested(optimizer):
                for name, operation in operations.items():
                    assign = self._selecting(part, name, operation)
                    replacements.swap(undo, part, name, assign)
            yield

    def _selecting(
        self, optimizer: Optimizer, name: str, operation: Callable
    ) -> Callable:
        original, assign = getattr(optimizer, name), optimizer.assign

        def selecting(variable: Any, value: Any) -> None:
            if not self.is_made(variable):
                original(variable, value)
                return
            if hasattr(value, "dense_shape"):
                # A sparse one has no rows when nothing is to change.
                original(variable, value)
            else:
                old = keras.ops.convert_to_tensor(variable)
                new = operation(old, keras.ops.cast(value, old.dtype))
                assign(variable, keras.ops.where(self._condition, new, old))
            self._marks[_place(variable)] = compilation.mark(variable)

        return selecting


_TENSORFLOW = keras.backend.backend() == "tensorflow"
_is_same = operator.eq if _TENSORFLOW else operator.is_


def _place(variable: Any) -> int:
    """Returns what tells a variable, or the `tf.Variable` in it, apart."""
    return id(
        getattr(variable, "_value", variable) if _TENSORFLOW else variable
    )


def strategy_of(optimizer: Optimizer) -> Any:
    """Returns the `tf.distribute.Strategy` it was made under, or `None`."""
    return getattr(optimizer, "_distribution_strategy", None)


class OverwritesThroughInner:
    """Mixin: overwrites variables as the inner optimizer does."""

    inner_optimizer: Optimizer

    def _overwrite_variable_with_gradient(self, variable: Any) -> Any:
        return self.inner_optimizer._overwrite_variable_with_gradient(variable)


def count_as_tracked(optimizer: Optimizer, variable: keras.Variable) -> None:
    """Keeps an optimizer from adding a variable to those that it saves."""
    optimizer._tracker.stored_ids["variables"].add(id(variable))


def uses_weight_decay(optimizer: Optimizer, variable: keras.Variable) -> bool:
    """Returns False if `exclude_from_weight_decay` named the variable."""
    # Keras 3.16 decides at the build, and tells by another name before.
    excluded = getattr(optimizer, "_is_excluded_from_weight_decay", None)
    if excluded is not None:
        return not excluded(variable)
    return bool(optimizer._use_weight_decay(variable))


def undecayed(optimizer: Optimizer, variables: Sequence) -> list:
    """Returns the variables that an optimizer's weight decay leaves out."""
    return [v for v in variables if not uses_weight_decay(optimizer, v)]


def named(
    variables: Sequence, var_list: Sequence | None, var_names: Sequence | None
) -> list[keras.Variable]:
    """Returns what the arguments of `exclude_from_weight_decay` mean."""
    keys = {key(variable) for variable in var_list or ()}
    pattern = "|".join(var_names or ())
    return [
        v
        for v in variables
        if key(v) in keys or (pattern and re.search(pattern, v.name))
    ]
