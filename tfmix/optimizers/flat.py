"""Flat masters: one float32 vector for all 16-bit variables of a dtype."""

import math
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from tfmix._keras import optimizers
from tfmix.optimizers import bits, sixteen_bit_optimizer

# They are recognised by their `update_step`, so subclasses that inherit it
# count, too. `ScheduleFreeAdamW` is in Keras 3.13 and newer.
ELEMENTWISE = tuple(
    "SGD Adam AdamW Adamax Adagrad Adadelta RMSprop Nadam Ftrl Lion "
    "ScheduleFreeAdamW".split()
)


class FlatMasters(sixteen_bit_optimizer.Float32Weights):
    """Keeps one float32 vector per group of 16-bit variables.

    All variables of a group have the same dtype and the same weight decay.
    """

    def make(self) -> dict[int, keras.Variable]:
        """Creates the groups; raises an error if variables cannot be joined."""
        inner = self.optimizer.inner_optimizer
        _check_optimizer(inner)
        _check_variables(self.narrow)
        members: dict[tuple[str, ...], list[keras.Variable]] = {}
        for variable in self.narrow:
            decays = optimizers.uses_weight_decay(inner, variable)
            dtype = keras.backend.standardize_dtype(variable.dtype)
            key = dtype, "" if decays else "_no_decay"
            members.setdefault(key, []).append(variable)
        self.groups = [Group(self.optimizer, *item) for item in members.items()]
        self._group_of = {
            id(member): group
            for group in self.groups
            for member in group.variables
        }
        return {key: group.master for key, group in self._group_of.items()}

    def targets(
        self, these: sixteen_bit_optimizer.Variables
    ) -> list[keras.Variable]:
        """Returns the vectors, then the variables outside of all groups."""
        ids = set(map(id, these))
        vectors = [
            group.master
            for group in self.groups
            if any(id(variable) in ids for variable in group.variables)
        ]
        return vectors + self._others(these)

    def _others(
        self, these: sixteen_bit_optimizer.Variables
    ) -> list[keras.Variable]:
        return [v for v in these if id(v) not in self._group_of]

    def refresh(self) -> None:
        """Updates the vectors with values assigned to the model's variables."""
        for group in self.groups:
            stored = concatenate(group.variables)
            group.master.assign(bits.refresh_master(group.master, stored))

    def route(
        self, grads: Sequence, of: sixteen_bit_optimizer.Variables
    ) -> tuple[list, list]:
        """Joins the model's gradients into the inner optimizer's."""
        # `clipnorm` may have been set since the first check.
        _check_optimizer(self.optimizer.inner_optimizer)
        grad_of = dict(zip(map(id, of), self.widen(grads, of), strict=True))
        vectors = []
        for group in self.groups:
            grads = [grad_of.get(id(v)) for v in group.variables]
            pairs = zip(group.variables, grads, strict=True)
            if missing := [v.path for v, grad in pairs if grad is None]:
                raise ValueError(
                    "flat=True updates all 16-bit variables at once and needs "
                    f"a gradient for each. Received: none for {missing}. "
                    "Freeze them (`trainable = False`) before the optimizer "
                    "is built, or use flat=False."
                )
            vectors.append(concatenate(grads))
        vectors += [grad_of[id(variable)] for variable in self._others(of)]
        return vectors, self.targets(of)

    def write_back(self) -> None:
        """Rounds the vectors into the model's variables."""
        for group in self.groups:
            parts = group.cut(ops.cast(group.master, group.dtype))
            for variable, part in zip(group.variables, parts, strict=True):
                variable.assign(part)

    def read(self, variable: keras.Variable) -> Any:
        """Returns the float32 value behind a model's variable."""
        group = self._group_of.get(id(variable))
        if group is None:
            return super().read(variable)
        return group.cut(group.master)[group.position(variable)]

    def assign(self, variable: keras.Variable, value: Any) -> None:
        """Sets the float32 value behind a variable, and the variable."""
        if group := self._group_of.get(id(variable)):
            parts = group.cut(group.master)
            parts[group.position(variable)] = value
            group.master.assign(concatenate(parts))
        variable.assign(ops.cast(value, variable.dtype))


class Group:
    """Variables that share a vector; `key` is the dtype and name suffixes."""

    def __init__(
        self,
        optimizer: sixteen_bit_optimizer.SixteenBitOptimizer,
        key: tuple[str, ...],
        members: list[keras.Variable],
    ) -> None:
        self.dtype, self.variables = key[0], members
        sizes = [math.prod(variable.shape) for variable in members]
        self.ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        self.master = optimizers.add_variable(
            optimizer,
            shape=(self.ends[-1],),
            initializer=lambda shape, dtype: ops.cast(
                concatenate(members), dtype
            ),
            dtype="float32",
            name=f"flat_{''.join(key)}",
            aggregation=members[0].aggregation,
        )

    def position(self, variable: keras.Variable) -> int:
        """Returns the index of a variable in the group."""
        return [id(member) for member in self.variables].index(id(variable))

    def cut(self, vector: Any) -> list:
        """Cuts a vector into tensors of the variables' shapes."""
        several = len(self.variables) > 1
        pieces = ops.split(vector, self.ends[:-1]) if several else [vector]
        pairs = zip(pieces, self.variables, strict=True)
        return [ops.reshape(piece, variable.shape) for piece, variable in pairs]


def concatenate(tensors: Sequence) -> Any:
    """Joins tensors of one dtype, also sparse gradients, into one vector."""
    flat = [ops.reshape(ops.convert_to_tensor(t), (-1,)) for t in tensors]
    return flat[0] if len(flat) == 1 else ops.concatenate(flat)


def _check_optimizer(optimizer: keras.optimizers.Optimizer) -> None:
    """Raises an error for an optimizer that needs each variable separately."""
    if optimizer.clipnorm is not None:
        raise ValueError(
            "flat=True cannot run clipnorm, which clips each variable's "
            f"gradient by its own norm. Received: clipnorm="
            f"{optimizer.clipnorm!r}. Use global_clipnorm, clipvalue or "
            "flat=False."
        )
    kinds = [vars(keras.optimizers).get(each) for each in ELEMENTWISE]
    updates = [kind.update_step for kind in kinds if kind]
    declared = getattr(type(optimizer), "elementwise", False)
    if not declared and type(optimizer).update_step not in updates:
        raise ValueError(
            "flat=True needs an element-wise optimizer: "
            f"{list(ELEMENTWISE)}, or a class that declares "
            "`elementwise = True`. Received: inner_optimizer="
            f"{optimizer.name!r} of type {type(optimizer).__name__}. Use "
            "flat=False."
        )


def _check_variables(narrow: sixteen_bit_optimizer.Variables) -> None:
    """Raises an error for variables that cannot be parts of one vector."""
    for variable in narrow:
        if variable.constraint is not None:
            raise ValueError(
                "flat=True cannot apply the constraint of one variable to a "
                f"part of a vector. Received: variable {variable.path!r} with "
                f"constraint={variable.constraint!r}. Use flat=False."
            )
    distribution = keras.distribution.distribution()
    if isinstance(distribution, keras.distribution.ModelParallel):
        raise ValueError(
            "flat=True cannot join variables that are sharded differently. "
            f"Received: distribution={distribution!r}. Use flat=False."
        )
