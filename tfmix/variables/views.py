"""Views of all bfloat16 variables, and how they notice a loaded weight."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
from keras import ops

from tfmix._keras import optimizers
from tfmix.variables import bits, view


class Views:
    """Lets the inner optimizer update float32 views of bfloat16 variables.

    Args:
        optimizer: The wrapper that owns the state behind the views.
        variables: The model's variables, in order.
    """

    def __init__(self, optimizer: Any, variables: Sequence) -> None:
        self.variables = list(variables)
        self.views = {
            id(variable): self.make_view(optimizer, variable)
            for variable in variables
            if optimizers.is_sixteen_bit(variable)
        }
        self.companions = [v for v in self.views.values() if has_rest(v)]
        if self.companions:
            self.seen = optimizer.add_fingerprints(
                [v.stored for v in self.companions]
            )

    def make_view(self, optimizer: Any, variable: Any) -> view.Float32View:
        """Creates the view of one bfloat16 variable."""
        raise NotImplementedError

    def target(self, variable: Any) -> Any:
        """The variable the inner optimizer updates for a model's variable."""
        return self.views.get(id(variable), variable)

    def targets(self) -> list:
        """All variables of the inner optimizer, in the model's order."""
        return [self.target(variable) for variable in self.variables]

    @contextlib.contextmanager
    def creating_slots(self) -> Iterator[None]:
        """Lets the inner optimizer place its slots beside the variables."""
        try:
            for each in self.views.values():
                each.colocating = True
            yield
        finally:
            for each in self.views.values():
                each.colocating = False

    def refresh(self) -> None:
        """Drops the rest of every variable that somebody assigned.

        What is kept beside a variable belongs to the value it had. After
        `load_weights` it would shift the loaded weight by up to half a step.
        """
        if not self.companions:
            return
        now = self._fingerprints()
        for i, each in enumerate(self.companions):
            same = ops.equal(now[i], ops.convert_to_tensor(self.seen)[i])
            rest = ops.convert_to_tensor(each.rest)
            each.rest.assign(ops.where(same, rest, ops.zeros_like(rest)))

    def write_back(self) -> None:
        """Notes what the variables hold now."""
        if self.companions:
            self.seen.assign(self._fingerprints())

    def _fingerprints(self) -> Any:
        return ops.stack(
            [bits.fingerprint(each.stored) for each in self.companions]
        )

    def route(self, grads: Sequence, variables: Sequence) -> tuple[list, list]:
        """Turns the model's gradients into the inner optimizer's.

        Args:
            grads: One gradient (tensor, sparse or `None`) per variable.
            variables: The model's variables they belong to.

        Returns:
            Dense gradients in float32 and the variables to update with them.
        """
        routed = []
        for grad, variable in zip(grads, variables, strict=True):
            if grad is not None and id(variable) in self.views:
                grad = ops.cast(ops.convert_to_tensor(grad), "float32")
            routed.append(grad)
        return routed, [self.target(variable) for variable in variables]

    def read(self, variable: Any) -> Any:
        """The float32 value behind a model's variable."""
        each = self.views.get(id(variable))
        return ops.cast(variable, "float32") if each is None else each.load()

    def assign(self, variable: Any, value: Any) -> None:
        """Sets the float32 value behind a model's variable, and the variable.

        Args:
            variable: The model's variable.
            value: Float32 tensor of the variable's shape.
        """
        self.target(variable).assign(value)
        self.write_back()


def has_rest(each: view.Float32View) -> bool:
    """Whether a view keeps more than the model's variable."""
    return getattr(each, "rest", None) is not None


def check_bfloat16(variables: Sequence, reason: str) -> None:
    """Refuses float16 variables.

    Args:
        variables: The model's variables.
        reason: Why they do not fit; opens the message.

    Raises:
        ValueError: If a variable is float16.
    """
    for variable in filter(optimizers.is_sixteen_bit, variables):
        dtype = keras.backend.standardize_dtype(variable.dtype)
        if dtype != "bfloat16":
            raise ValueError(
                f"{reason}. Received: variable {variable.path!r} of dtype "
                f"{dtype!r}. Use the policy 'bfloat16', or "
                "MasterWeightOptimizer(optimizer) for float16."
            )
