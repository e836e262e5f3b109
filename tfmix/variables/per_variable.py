"""Masters, the plain way: one float32 variable behind each 16-bit one."""

import contextlib
from collections.abc import Sequence
from typing import Any

from keras import ops

from tfmix._keras import optimizers
from tfmix.variables import bits


class PerVariableMasters:
    """Keeps a float32 master for every 16-bit variable.

    Args:
        optimizer: The wrapper that owns the masters.
        variables: The model's variables, in order.
    """

    def __init__(self, optimizer: Any, variables: Sequence) -> None:
        self.masters = {
            id(variable): optimizer.add_master(variable)
            for variable in variables
            if optimizers.is_sixteen_bit(variable)
        }
        self.variables = list(variables)

    def target(self, variable: Any) -> Any:
        """The variable the inner optimizer updates for a model's variable."""
        return self.masters.get(id(variable), variable)

    def targets(self) -> list:
        """All variables of the inner optimizer, in the model's order."""
        return [self.target(variable) for variable in self.variables]

    def creating_slots(self) -> contextlib.AbstractContextManager:
        """Nothing to do: the masters are variables, slots lie beside them."""
        return contextlib.nullcontext()

    def refresh(self) -> None:
        """Takes over the elements somebody assigned to the model's variables.

        After `load_weights` a master would otherwise put its old value back.
        An untouched element equals the master's rounded value exactly.
        """
        for variable in self.variables:
            master = self.masters.get(id(variable))
            if master is not None:
                master.assign(refreshed(master, variable))

    def route(self, grads: Sequence, variables: Sequence) -> tuple[list, list]:
        """Turns the model's gradients into the inner optimizer's.

        Args:
            grads: One gradient (tensor, sparse or `None`) per variable.
            variables: The model's variables they belong to.

        Returns:
            Gradients in float32 and the variables to update with them.
        """
        routed = []
        for grad, variable in zip(grads, variables, strict=True):
            if grad is not None and id(variable) in self.masters:
                grad = ops.cast(grad, "float32")
            routed.append(grad)
        return routed, [self.target(variable) for variable in variables]

    def write_back(self) -> None:
        """Rounds the masters into the model's variables."""
        for variable in self.variables:
            master = self.masters.get(id(variable))
            if master is not None:
                variable.assign(ops.cast(master, variable.dtype))

    def read(self, variable: Any) -> Any:
        """The float32 value behind a model's variable."""
        return ops.cast(self.target(variable), "float32")

    def assign(self, variable: Any, value: Any) -> None:
        """Sets the float32 value behind a model's variable, and the variable.

        Args:
            variable: The model's variable.
            value: Float32 tensor of the variable's shape.
        """
        self.target(variable).assign(value)
        variable.assign(ops.cast(value, variable.dtype))


def refreshed(master: Any, stored: Any) -> Any:
    """The master's value where its rounding is what is stored, else that.

    Args:
        master: Float32 tensor or variable.
        stored: 16-bit tensor or variable of the same shape.

    Returns:
        Float32 tensor of the same shape.

    Example:
        >>> stored = ops.array([1.0, 2.0], "bfloat16")
        >>> ops.convert_to_numpy(refreshed(ops.array([1.001, 3.0]), stored))
        array([1.001, 2.   ], dtype=float32)
    """
    master = ops.convert_to_tensor(master)
    stored = ops.convert_to_tensor(stored)
    rounded = ops.cast(master, stored.dtype)
    # Compared as bits: XLA may drop a rounding whose result it computes with.
    untouched = ops.equal(
        bits.bitcast(rounded, "uint16"), bits.bitcast(stored, "uint16")
    )
    return ops.where(untouched, master, ops.cast(stored, "float32"))
