"""The step of an optimizer whose model has 16-bit variables."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops

from tfmix._keras import compilation, optimizers
from tfmix.scaling.step import replicas
from tfmix.variables import bits, wrapper


class SixteenBitOptimizer(wrapper.OptimizerWrapper):
    """Lets an inner optimizer update 16-bit variables in float32.

    Subclasses say through `make_store` where the bits that do not fit into a
    variable are kept. Takes the arguments of `OptimizerWrapper`.
    """

    built: bool

    def make_store(self, variables: Sequence) -> Any:
        """Creates what stands between the model's and the inner variables.

        Args:
            variables: The model's trainable variables.

        Returns:
            An object with the methods of `per_variable.PerVariableMasters`.
        """
        raise NotImplementedError

    def build(self, variables: Sequence) -> None:
        """Creates the state for a model's trainable variables.

        Args:
            variables: List of `keras.Variable`s.

        Raises:
            ValueError: If a variable does not fit.
        """
        if self.built:
            return
        variables = list(variables)
        # Past the automatic tracking: these are the model's, not ours.
        self.__dict__["_trainable_variables"] = variables
        self.__dict__["_trainable_variables_indices"] = {
            self._var_key(variable): i for i, variable in enumerate(variables)
        }
        with compilation.outside_of_tracing(variables):
            self._build(variables)
        self.built = True

    def _build(self, variables: list) -> None:
        store = self.make_store(variables)
        self._store = store
        optimizers.carry_weight_decay_exclusions(
            self.inner_optimizer,
            variables,
            [store.target(variable) for variable in variables],
        )
        with store.creating_slots():
            self.inner_optimizer.build(store.targets())

    def apply(
        self, grads: Sequence, trainable_variables: Sequence | None = None
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
        if not self.built:
            if trainable_variables is None:
                raise ValueError(
                    "The optimizer is not built yet. Received: "
                    "trainable_variables=None. Pass the variables, or call "
                    "build(model.trainable_variables) first."
                )
            with keras.name_scope(self.name):
                self.build(trainable_variables)
        variables = self._trainable_variables
        if trainable_variables is not None:
            variables = list(trainable_variables)
            self._check_variables_are_known(variables)
            # The same objects as in `build`, whatever stands for them here.
            known = self._trainable_variables
            variables = [known[self._get_variable_index(v)] for v in variables]
        if len(grads) != len(variables):
            raise ValueError(
                "There must be one gradient per variable. Received: "
                f"{len(grads)} gradients for {len(variables)} variables."
            )
        grads = replicas.sum_gradients(grads, variables)
        with replicas.single(self):
            self._step(grads, variables)

    def _step(self, grads: Sequence, variables: Sequence) -> None:
        self._store.refresh()
        routed, targets = self._store.route(grads, variables)
        self.inner_optimizer.apply(routed, targets)
        self._store.write_back()

    def finalize_variable_values(self, var_list: Sequence) -> None:
        """Gives the model the inner optimizer's final (averaged) weights.

        Args:
            var_list: The model's variables; the optimizer's own list counts.
        """
        if self.built:
            replicas.run_on_each(self, self._finalize)

    def _finalize(self) -> None:
        self._store.refresh()
        self.inner_optimizer.finalize_variable_values(self._store.targets())
        self._store.write_back()

    def read_float32(self, variable: Any) -> Any:
        """Returns the float32 value behind a model's variable.

        Args:
            variable: A variable the optimizer was built with.

        Returns:
            A float32 tensor of the variable's shape.

        Raises:
            ValueError: If the variable is unknown.
        """
        self._check_variables_are_known([variable])
        self._store.refresh()
        return self._store.read(variable)

    def assign_float32(self, variable: Any, value: Any) -> None:
        """Sets the float32 value behind a model's variable, and the variable.

        Args:
            variable: A variable the optimizer was built with.
            value: Array of the variable's shape.

        Raises:
            ValueError: If the variable is unknown.
        """
        self._check_variables_are_known([variable])
        self._store.assign(variable, ops.convert_to_tensor(value, "float32"))

    def add_float32(
        self, shape: tuple, value: Callable[[], Any], name: str, **how: Any
    ) -> Any:
        """Adds a float32 variable that starts from the model's values.

        Args:
            shape: Tuple of integers.
            value: Function that returns the first value, of any float dtype.
            name: String.
            **how: `layout` and `aggregation`, as `add_variable` takes them.

        Returns:
            A tracked `keras.Variable`.
        """
        return self.add_variable(
            shape=shape,
            initializer=lambda shape, dtype: ops.cast(value(), dtype),
            dtype="float32",
            name=name,
            **how,
        )

    def add_master(self, variable: Any) -> Any:
        """Adds the float32 master of one model variable."""
        master = self.add_float32(
            shape=tuple(variable.shape),
            value=lambda: variable.value,
            name=variable.name,
            layout=getattr(variable, "_layout", None),
            aggregation=variable.aggregation,
        )
        return optimizers.adopt(master, variable)

    def add_companion(self, variable: Any, dtype: str, name: str) -> Any:
        """Adds a variable of zeros beside one of the model's.

        Args:
            variable: The model's variable.
            dtype: Name of the new variable's dtype.
            name: Suffix of its name.

        Returns:
            A tracked `keras.Variable` of the same shape and layout.
        """
        return self.add_variable(
            shape=tuple(variable.shape),
            dtype=dtype,
            name=f"{variable.path.replace('/', '_')}_{name}",
            layout=getattr(variable, "_layout", None),
            aggregation=variable.aggregation,
        )

    def add_fingerprints(self, variables: Sequence) -> Any:
        """Adds the fingerprints of variables as one int32 vector.

        Args:
            variables: The model's 16-bit variables.

        Returns:
            A tracked `keras.Variable` that holds what they have now.
        """
        return self.add_variable(
            shape=(len(variables),),
            initializer=lambda shape, dtype: ops.stack(
                [bits.fingerprint(v.value) for v in variables]
            ),
            dtype="int32",
            name="fingerprints",
            aggregation="only_first_replica",
        )
