"""The base class of optimizers that leave the update to an inner one."""

import random
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from tfmix import _arguments
from tfmix._keras import optimizers
from tfmix._keras import variables as keras_variables
from tfmix.loss_scaling import optimizer as scaling
from tfmix.optimizers import noise
from tfmix.step import replicas

Variables = keras_variables.Variables


class OptimizerWrapper(
    optimizers.AveragesOfInner,
    scaling.DelegatesToInner,
    keras.optimizers.Optimizer,
):
    """Changes what an inner optimizer updates, or how it keeps its state."""

    # These are class attributes, so that setting them does not reach an inner
    # optimizer with attributes of the same names.
    seed: int | None = None
    seed_variable: keras.Variable | None = None

    def __init__(self, inner_optimizer: Any, name: str | None = None) -> None:
        inner_optimizer = scaling.checked(inner_optimizer)
        self._check_not_built(inner_optimizer)
        super().__init__(learning_rate=0.0, name=name)
        self.inner_optimizer = inner_optimizer

    @property
    def variables(self) -> list[keras.Variable]:
        """The wrapper's own variables, then the inner optimizer's."""
        own: list[keras.Variable] = super().variables
        return own + self.inner_optimizer.variables

    def build(self, variables: Variables) -> None:
        """Creates the state for a model's trainable variables.

        Args:
            variables: The variables, in the order of later gradients. A
                second call changes nothing.

        Raises:
            ValueError: If a variable does not fit, or the inner optimizer is
                built already.
        """
        if self.built:
            return
        self._check_not_built(self.inner_optimizer)
        variables = list(variables)
        optimizers.remember(self, variables)
        with keras_variables.outside_of_tracing(variables):
            self.build_inner(variables)
        self.built = True

    def build_inner(self, variables: Variables) -> None:
        """Builds the inner optimizer for the variables of a model."""
        raise NotImplementedError

    def apply(
        self, grads: Sequence, trainable_variables: Variables | None = None
    ) -> None:
        """Applies one step to the model's variables.

        Args:
            grads: Gradients, one per variable, in any float dtype; `None` for
                a variable that the loss does not depend on.
            trainable_variables: The variables, on the first call at least.
                Defaults to those the optimizer was built with.

        Raises:
            ValueError: If a variable is unknown, or the number of gradients
                is wrong.
        """
        if len(grads) == 0:
            return
        variables = self.variables_of(grads, trainable_variables)
        grads = replicas.sum_gradients(grads, variables)
        known = optimizers.remembered(self)
        with replicas.one_replica([*self.variables, *known], self):
            self.update(grads, variables)

    def update(self, grads: list, variables: Variables) -> None:
        """Applies gradients that are summed over replicas."""
        self.inner_optimizer.apply(grads, variables)

    def finalize_variable_values(self, var_list: Variables) -> None:
        """Assigns the inner optimizer's final (averaged) weights."""
        self.inner_optimizer.finalize_variable_values(var_list)

    def load_own_variables(self, store: Any) -> None:
        """Reads the whole state, or nothing; see Keras's class.

        Args:
            store: Keras's mapping of indices, as strings, to arrays.
        """
        if not self.built:
            # Keras loads the inner optimizer next, which warns about this.
            return
        count = len(self.variables)
        if len(store.keys()) != count:
            super().load_own_variables(store)
        else:
            arrays = [store[str(index)] for index in range(count)]
            keras_variables.assign_all(self.variables, arrays)

    def get_config(self) -> dict:
        """Returns the settings `from_config` needs."""
        inner = keras.saving.serialize_keras_object(self.inner_optimizer)
        config = {"name": self.name, "inner_optimizer": inner}
        return config | ({} if self.seed is None else {"seed": self.seed})

    def _add_seed(self, seed: int | None) -> None:
        """Makes `draw_noise` start from a seed; `None` draws one."""
        if seed is None:
            seed = random.randrange(2**31)
        self.seed = _arguments.count("seed", seed, lowest=0)
        if self.seed >= 2**31:
            raise ValueError(
                f"`seed` must lie below 2**31. Received: seed={seed!r}."
            )
        # It is a variable, so that a loaded checkpoint continues the same
        # random numbers.
        self.seed_variable = self.add_variable(
            shape=(),
            initializer=keras.initializers.Constant(self.seed),
            dtype="int32",
            aggregation="only_first_replica",
            name="seed",
        )

    def draw_noise(
        self, shape: tuple[int, ...], stream: int, offset: Any = 0
    ) -> Any:
        """Returns the noise that rounds a tensor in this step; see `noise`."""
        seed = ops.convert_to_tensor(self.seed_variable) + offset
        step = ops.cast(self.iterations, "int32")
        return noise.noise(shape, seed, stream, step)

    def _check_not_built(self, optimizer: optimizers.Optimizer) -> None:
        for nested in optimizers.with_nested(optimizer):
            if nested.built:
                raise ValueError(
                    f"{type(self).__name__} builds the inner optimizer itself. "
                    f"Received: inner_optimizer={nested.name!r}, which is "
                    "built already. Pass a fresh one, for example "
                    f"{type(nested).__name__}.from_config("
                    "optimizer.get_config())."
                )
