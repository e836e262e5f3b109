"""The parts of Keras's optimizers that tfmix reaches into."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import keras

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


# mypy does not allow a base class that is looked up.
class Saveable(
    next(  # type: ignore[misc]
        kind
        for kind in keras.optimizers.Optimizer.__mro__
        if kind.__name__ == "KerasSaveable"
    )
):
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
