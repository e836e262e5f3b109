"""Flat masters: all 16-bit variables of a dtype behind one float32 vector."""

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from tfmix._keras import optimizers
from tfmix.variables import elementwise, per_variable


class FlatMasters:
    """Keeps one float32 vector per group of 16-bit variables.

    A group is what one update can treat alike: one dtype, with or without
    weight decay. The inner optimizer then updates a few vectors instead of
    hundreds of variables. A few optimizers would give some elements another
    last bit there; see `elementwise.UNEVEN`.

    Args:
        optimizer: The wrapper that owns the vectors.
        variables: The model's variables, in order.

    Raises:
        ValueError: If the inner optimizer or a variable needs its variables
            apart.
    """

    def __init__(self, optimizer: Any, variables: Sequence) -> None:
        elementwise.check_optimizer(optimizer.inner_optimizer)
        elementwise.check_variables(variables)
        self.variables = list(variables)
        members: dict[tuple, list] = {}
        for variable in variables:
            if optimizers.is_sixteen_bit(variable):
                decays = optimizers.uses_weight_decay(
                    optimizer.inner_optimizer, variable
                )
                alone = elementwise.must_stay_alone(
                    optimizer.inner_optimizer, variable
                )
                key = (
                    keras.backend.standardize_dtype(variable.dtype),
                    "" if decays else "_no_decay",
                    f"_{len(members)}" if alone else "",
                )
                members.setdefault(key, []).append(variable)
        self.groups = [
            Group(optimizer, key, group) for key, group in members.items()
        ]
        self._group_of = {
            id(variable): group
            for group in self.groups
            for variable in group.variables
        }

    def target(self, variable: Any) -> Any:
        """The variable the inner optimizer updates for a model's variable."""
        group = self._group_of.get(id(variable))
        return variable if group is None else group.master

    def targets(self) -> list:
        """All variables of the inner optimizer: vectors, then the others."""
        others = [v for v in self.variables if id(v) not in self._group_of]
        return [group.master for group in self.groups] + others

    def creating_slots(self) -> contextlib.AbstractContextManager:
        """Nothing to do: the masters are variables, slots lie beside them."""
        return contextlib.nullcontext()

    def refresh(self) -> None:
        """Takes over what somebody assigned to the model's variables."""
        for group in self.groups:
            stored = joined(group.variables)
            group.master.assign(per_variable.refreshed(group.master, stored))

    def route(self, grads: Sequence, variables: Sequence) -> tuple[list, list]:
        """Joins the model's gradients into the inner optimizer's.

        Args:
            grads: One gradient (dense or sparse tensor) per variable.
            variables: The model's variables they belong to.

        Returns:
            Gradients and the variables to update with them.

        Raises:
            ValueError: If a variable of a group has no gradient.
        """
        of = {id(v): grad for v, grad in zip(variables, grads, strict=True)}
        others = [v for v in variables if id(v) not in self._group_of]
        vectors = []
        for group in self.groups:
            lost = [v.path for v in group.variables if of.get(id(v)) is None]
            if lost:
                raise ValueError(
                    "flat=True updates all 16-bit variables at once and needs "
                    f"a gradient for each. Received: none for {lost}. Freeze "
                    "them (`trainable = False`) before the optimizer is "
                    "built, or use flat=False."
                )
            vectors.append(joined([of[id(v)] for v in group.variables]))
        return (
            [ops.cast(vector, "float32") for vector in vectors]
            + [of[id(v)] for v in others],
            [group.master for group in self.groups] + others,
        )

    def write_back(self) -> None:
        """Rounds the vectors into the model's variables."""
        for group in self.groups:
            rounded = ops.cast(group.master, group.dtype)
            for variable, part in zip(
                group.variables, group.parts(rounded), strict=True
            ):
                variable.assign(part)

    def read(self, variable: Any) -> Any:
        """The float32 value behind a model's variable."""
        group = self._group_of.get(id(variable))
        if group is None:
            return ops.cast(variable, "float32")
        return group.parts(group.master)[group.position(variable)]

    def assign(self, variable: Any, value: Any) -> None:
        """Sets the float32 value behind a model's variable, and the variable.

        Args:
            variable: The model's variable.
            value: Float32 tensor of the variable's shape.
        """
        group = self._group_of.get(id(variable))
        if group is not None:
            parts = group.parts(group.master)
            parts[group.position(variable)] = value
            group.master.assign(joined(parts))
        variable.assign(ops.cast(value, variable.dtype))


class Group:
    """Variables that share a vector, and where each lies in it.

    Args:
        optimizer: The wrapper that owns the vector.
        key: dtype, and what sets its name apart from those of other groups.
        variables: The model's variables of the group.
    """

    def __init__(
        self, optimizer: Any, key: tuple[str, str, str], variables: list
    ) -> None:
        self.dtype = key[0]
        self.variables = variables
        sizes = [math.prod(variable.shape) for variable in variables]
        self.ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        self.master = optimizer.add_float32(
            shape=(self.ends[-1],),
            value=lambda: joined([v.value for v in variables]),
            name=f"flat_{''.join(key)}",
            aggregation=variables[0].aggregation,
        )

    def position(self, variable: Any) -> int:
        """The place of a variable among the group's."""
        return [id(each) for each in self.variables].index(id(variable))

    def parts(self, vector: Any) -> list:
        """Cuts a vector into tensors of the variables' shapes."""
        pieces = [vector]
        if len(self.variables) > 1:
            pieces = ops.split(vector, self.ends[:-1])
        return [
            ops.reshape(piece, variable.shape)
            for piece, variable in zip(pieces, self.variables, strict=True)
        ]


def joined(tensors: Sequence) -> Any:
    """Joins tensors of one dtype into a vector.

    Args:
        tensors: Tensors or variables of any shape, sparse gradients included.

    Returns:
        A tensor of rank 1.

    Example:
        >>> len(joined([ops.ones((2, 2)), ops.zeros(1)]))
        5
    """
    flat = [ops.reshape(ops.convert_to_tensor(t), (-1,)) for t in tensors]
    return flat[0] if len(flat) == 1 else ops.concatenate(flat)
