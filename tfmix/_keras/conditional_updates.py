"""Assignments of a block that count only if a condition holds, under JAX."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import keras

from tfmix._keras import compilation, global_state


class _Scope(keras.StatelessScope):
    """Selects the old or the new value in each assignment.

    Later assignments of the block then read the selected value. If only its end
    selected, XLA would need a second copy of optimizer state on a CPU, because
    the weights' update reads the new state.
    """

    def __init__(self, condition: Any, variables: Iterable, outer: Any) -> None:
        super().__init__(initialize_variables=False)
        self.condition = condition
        self.chosen = set(map(id, variables))
        self.state_mapping = dict(outer.state_mapping)

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        """Receives what `keras.Variable.assign` was given."""
        variable, new = update
        old = compilation.read(variable)
        if id(variable) in self.chosen and new is not old:
            new = compilation.selected(self.condition, new, old)
        super().add_update((variable, new))


@contextlib.contextmanager
def only_if(condition: Any, variables: Iterable) -> Iterator[None]:
    """Makes assignments to some variables depend on a condition.

    Args:
        condition: Boolean scalar tensor.
        variables: The variables that keep their values if it is false, all in a
            `keras.StatelessScope` around the block.
    """
    outer: Any = global_state.open_scope()
    with _Scope(condition, variables, outer) as scope:
        yield
    outer.state_mapping.update(scope.state_mapping)
