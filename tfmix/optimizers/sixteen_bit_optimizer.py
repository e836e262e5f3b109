"""The base class of optimizers that update 16-bit variables in float32."""

import contextlib
from typing import Any

import keras
from keras import ops

from tfmix._keras import optimizers
from tfmix._keras import variables as keras_variables
from tfmix.optimizers import wrapper

Variables = keras_variables.Variables


class SixteenBitOptimizer(wrapper.OptimizerWrapper):
    """Makes an inner optimizer update 16-bit variables in float32.

    A subclass creates the float32 weights that the inner optimizer updates, and
    decides where the bits are stored that do not fit into 16. Other variables
    have none.
    """

    # The 16-bit variables, each with its float32 weight, by the variable's
    # `id`.
    _pairs: dict[int, tuple[keras.Variable, Any]]

    def make_float32(self, variable: keras.Variable) -> keras.Variable:
        """Creates the float32 weight of a variable."""
        raise NotImplementedError

    def refresh(self) -> None:
        """Updates the weights with values assigned to model variables."""

    def write_back(self) -> None:
        """Copies the inner optimizer's update to the model's variables."""

    def building(self) -> contextlib.AbstractContextManager:
        """A context in which the inner optimizer is built."""
        return contextlib.nullcontext()

    def target(self, variable: keras.Variable) -> keras.Variable:
        """Returns a variable's weight, or the variable if it has none."""
        return self._pairs.get(id(variable), (None, variable))[1]

    def build_inner(self, variables: Variables) -> None:
        """Creates the weights, and builds the inner optimizer for them."""
        # Keras would track what is assigned.
        object.__setattr__(self, "_pairs", pairs := {})
        for variable in filter(keras_variables.is_sixteen_bit, variables):
            pairs[id(variable)] = variable, self.make_float32(variable)
        # Keras excludes variables from weight decay by identity, so the float32
        # weights must be excluded, too.
        *_, innermost = optimizers.chain(self.inner_optimizer)
        for worker in optimizers.workers(innermost):
            if excluded := optimizers.undecayed(worker, variables):
                targets = [*map(self.target, excluded)]
                worker.exclude_from_weight_decay(var_list=targets)
        with self.building():
            self.inner_optimizer.build([*map(self.target, variables)])

    def update(self, grads: list, variables: Variables) -> None:
        """Updates the float32 weights, and then the variables."""
        self.refresh()
        wide = [
            ops.cast(grad, "float32")
            if grad is not None and id(variable) in self._pairs
            else grad
            for grad, variable in zip(grads, variables, strict=True)
        ]
        self.inner_optimizer.apply(wide, [*map(self.target, variables)])
        self.write_back()

    def finalize_variable_values(self, var_list: Variables) -> None:
        """Assigns the inner optimizer's final (averaged) weights."""
        if not self.built:
            return
        self.refresh()
        for target, average in optimizers.averages(self.inner_optimizer):
            target.assign(average)
        self.write_back()

    def read_float32(self, variable: keras.Variable) -> Any:
        """Returns the float32 value behind a model's variable, as a tensor.

        Args:
            variable: One of those that the optimizer was built with.

        Raises:
            ValueError: If the optimizer was not built with the variable.
        """
        (variable,) = optimizers.recognised(self, [variable])
        self.refresh()
        return ops.cast(self.target(variable), "float32")

    def assign_float32(self, variable: keras.Variable, value: Any) -> None:
        """Sets the float32 value behind a model's variable, and the variable.

        Args:
            variable: One of those that the optimizer was built with.
            value: Array or tensor of the variable's shape; cast to float32.

        Raises:
            ValueError: If the optimizer was not built with the variable.
        """
        (variable,) = optimizers.recognised(self, [variable])
        value = ops.convert_to_tensor(value, "float32")
        self.target(variable).assign(value)
        variable.assign(ops.cast(value, variable.dtype))


def owner(optimizer: Any) -> SixteenBitOptimizer | None:
    """Returns the 16-bit optimizer inside an optimizer, if there is one."""
    for candidate in optimizers.with_nested(optimizer):
        if isinstance(candidate, SixteenBitOptimizer):
            return candidate
    return None
