"""The optimizer of 16-bit variables whose inner optimizer works in float32."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops

from tfmix._keras import optimizers, tracing, variables
from tfmix.scaling.step import replicas
from tfmix.variables import delegating


class StandIns:
    """What the inner optimizer updates in the place of 16-bit variables.

    Subclasses say through `make` where the bits that do not fit into a
    variable are kept. Other variables stand for themselves.

    Args:
        optimizer: The wrapper that owns the state.
        model_variables: The model's trainable variables, in order.

    Raises:
        ValueError: If a variable does not fit.
    """

    def __init__(
        self,
        optimizer: "SixteenBitOptimizer",
        model_variables: Sequence[keras.Variable],
    ) -> None:
        self.optimizer = optimizer
        self.variables = list(model_variables)
        self.narrow = [v for v in self.variables if variables.is_sixteen_bit(v)]
        self.stand_ins = self.make()

    def make(self) -> dict[int, keras.Variable]:
        """Returns the stand-in of each of the `narrow` variables, by `id`."""
        raise NotImplementedError

    def refresh(self) -> None:
        """Takes over what somebody assigned to the model's variables."""
        raise NotImplementedError

    def write_back(self) -> None:
        """Notes in the model's variables what the inner optimizer did."""
        raise NotImplementedError

    def target(self, variable: keras.Variable) -> keras.Variable:
        """Returns what the inner optimizer updates for a variable."""
        return self.stand_ins.get(id(variable), variable)

    def targets(self) -> list[keras.Variable]:
        """Returns all variables of the inner optimizer."""
        return [self.target(variable) for variable in self.variables]

    def targets_of_all(
        self, chosen: Sequence[keras.Variable]
    ) -> list[keras.Variable]:
        """Returns the variables of the inner optimizer that mean these alone.

        Raises:
            ValueError: If one stands for another variable as well.
        """
        return [self.target(variable) for variable in chosen]

    def creating_slots(self) -> contextlib.AbstractContextManager:
        """Opens while the inner optimizer is built."""
        return contextlib.nullcontext()

    def route(
        self, grads: Sequence[Any], model_variables: Sequence[keras.Variable]
    ) -> tuple[list, list]:
        """Returns the inner optimizer's gradients and their variables.

        Args:
            grads: One gradient (tensor, sparse or `None`) per variable.
            model_variables: The model's variables they belong to.
        """
        routed = [
            ops.cast(grad, "float32")
            if grad is not None and id(variable) in self.stand_ins
            else grad
            for grad, variable in zip(grads, model_variables, strict=True)
        ]
        return routed, [self.target(variable) for variable in model_variables]

    def read(self, variable: keras.Variable) -> Any:
        """Returns the float32 value behind a model's variable."""
        return ops.cast(self.target(variable), "float32")

    def assign(self, variable: keras.Variable, value: Any) -> None:
        """Sets the float32 value behind a variable, and the variable."""
        raise NotImplementedError


class SixteenBitOptimizer(
    delegating.DelegatesToInner, keras.optimizers.Optimizer
):
    """Lets an inner optimizer update 16-bit variables in float32.

    Subclasses say through `make_stand_ins` how.

    Args:
        inner_optimizer: A `keras.optimizers.Optimizer`, its name or config.
        name: String. Defaults to the snake-case class name.

    Raises:
        ValueError: If `inner_optimizer` is built, is a loss-scale optimizer
            or wraps 16-bit variables itself.
        TypeError: If `inner_optimizer` is no optimizer.
    """

    def __init__(self, inner_optimizer: Any, name: str | None = None) -> None:
        inner_optimizer = _checked_inner(type(self).__name__, inner_optimizer)
        super().__init__(learning_rate=0.0, name=name)
        self.inner_optimizer = inner_optimizer

    def make_stand_ins(
        self, model_variables: Sequence[keras.Variable]
    ) -> StandIns:
        """Creates what stands between the model's and the inner variables."""
        raise NotImplementedError

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Creates the state for a model's trainable variables.

        Args:
            variables: List of `keras.Variable`s.

        Raises:
            ValueError: If a variable does not fit, or somebody else has built
                the inner optimizer.
        """
        if self.built:
            return
        _check_not_built(type(self).__name__, self.inner_optimizer)
        variables = list(variables)
        optimizers.remember(self, variables)
        with tracing.outside(variables):
            self._store = self.make_stand_ins(variables)
            for each in optimizers.workers(self.inner_optimizer):
                self._carry_exclusions(each, variables)
            with self._store.creating_slots():
                self.inner_optimizer.build(self._store.targets())
        self.built = True

    def _carry_exclusions(
        self,
        optimizer: keras.optimizers.Optimizer,
        model_variables: Sequence[keras.Variable],
    ) -> None:
        # Keras remembers them by identity.
        excluded = [
            variable
            for variable in model_variables
            if not optimizers.uses_weight_decay(optimizer, variable)
        ]
        if excluded:
            targets = self._store.targets_of_all(excluded)
            optimizer.exclude_from_weight_decay(var_list=targets)

    def exclude_from_weight_decay(
        self,
        var_list: Sequence[keras.Variable] | None = None,
        var_names: Sequence[str] | None = None,
    ) -> None:
        """Excludes variables from the inner optimizer's weight decay.

        As in Keras, what was excluded before is not any more.

        Args:
            var_list: The model's variables. Defaults to `None`.
            var_names: Strings; a variable whose name contains one of them is
                excluded. Defaults to `None`.

        Raises:
            ValueError: If the optimizer is built and has joined one of the
                variables to another that is not excluded.
        """
        if self.built:
            known = optimizers.remembered(self)
            excluded = optimizers.named(known, var_list, var_names)
            var_list, var_names = self._store.targets_of_all(excluded), None
        super().exclude_from_weight_decay(var_list, var_names)

    def scale_loss(self, loss: Any) -> Any:
        """Scales the loss as the inner optimizer does."""
        return self.inner_optimizer.scale_loss(loss)

    def apply(
        self,
        grads: Sequence[Any],
        trainable_variables: Sequence[keras.Variable] | None = None,
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
        variables = optimizers.remembered(self)
        if trainable_variables is not None:
            # The same objects as in `build`, whatever stands for them here.
            variables = optimizers.recognised(self, trainable_variables)
        if len(grads) != len(variables):
            raise ValueError(
                "There must be one gradient per variable. Received: "
                f"{len(grads)} gradients for {len(variables)} variables."
            )
        grads = replicas.sum_gradients(grads)
        with replicas.single(self):
            self._store.refresh()
            routed, targets = self._store.route(grads, variables)
            self.inner_optimizer.apply(routed, targets)
            self._store.write_back()

    def finalize_variable_values(
        self, var_list: Sequence[keras.Variable]
    ) -> None:
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

    def read_float32(self, variable: keras.Variable) -> Any:
        """Returns the float32 value behind a model's variable.

        Args:
            variable: A variable the optimizer was built with.

        Returns:
            A float32 tensor of the variable's shape.

        Raises:
            ValueError: If the variable is unknown.
        """
        (variable,) = optimizers.recognised(self, [variable])
        self._store.refresh()
        return self._store.read(variable)

    def assign_float32(self, variable: keras.Variable, value: Any) -> None:
        """Sets the float32 value behind a model's variable, and the variable.

        Args:
            variable: A variable the optimizer was built with.
            value: Array of the variable's shape.

        Raises:
            ValueError: If the variable is unknown.
        """
        (variable,) = optimizers.recognised(self, [variable])
        self._store.assign(variable, ops.convert_to_tensor(value, "float32"))

    def load_own_variables(self, store: Any) -> None:
        """Reads the whole state, or nothing.

        Args:
            store: Arrays by position, as `save_own_variables` writes them.

        Raises:
            ValueError: If a shape does not match. Another number of arrays
                is skipped with a warning, as in Keras.
        """
        keys = [str(index) for index in range(len(self.variables))]
        if len(store.keys()) != len(keys):
            super().load_own_variables(store)
        else:
            variables.assign_all(self.variables, [store[key] for key in keys])

    def add_float32(
        self,
        shape: tuple[int, ...],
        value: Callable[[], Any],
        name: str,
        **placement: Any,
    ) -> keras.Variable:
        """Adds a float32 variable that starts from the model's values."""
        return self.add_variable(
            shape=shape,
            initializer=lambda shape, dtype: ops.cast(value(), dtype),
            dtype="float32",
            name=name,
            **placement,
        )

    def get_config(self) -> dict:
        """Returns the settings `from_config` needs."""
        return {
            "name": self.name,
            "inner_optimizer": keras.saving.serialize_keras_object(
                self.inner_optimizer
            ),
        }

    @classmethod
    def from_config(
        cls, config: dict, custom_objects: dict | None = None
    ) -> "SixteenBitOptimizer":
        """Creates the optimizer, without state, from `get_config()`.

        Args:
            config: Dictionary; it is left as it was.
            custom_objects: Dictionary of names to classes, for the inner
                optimizer. Defaults to `None`.
        """
        config = dict(config)
        optimizer = keras.saving.deserialize_keras_object(
            config.pop("inner_optimizer"), custom_objects=custom_objects
        )
        return cls(optimizer, **config)


def _checked_inner(
    wrapper: str, optimizer: keras.optimizers.Optimizer | str | dict
) -> keras.optimizers.Optimizer:
    """Returns the optimizer to wrap, or says why it cannot be wrapped."""
    if isinstance(optimizer, str | dict):
        optimizer = keras.optimizers.get(optimizer)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            f"{wrapper} wraps a `keras.optimizers.Optimizer` or its name. "
            f"Received: inner_optimizer={optimizer!r} of type "
            f"{type(optimizer).__name__}."
        )
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            f"{wrapper} goes inside the loss-scale optimizer, where gradients "
            "are unscaled and finite. Received: inner_optimizer="
            f"{type(optimizer).__name__}. Write LossScaleOptimizer({wrapper}"
            "(optimizer)) instead."
        )
    if isinstance(optimizer, SixteenBitOptimizer):
        raise ValueError(
            f"{wrapper} cannot wrap {type(optimizer).__name__}: both would "
            "keep the same 16-bit variables. Received: inner_optimizer="
            f"{optimizer.name!r}. Keep one of the two."
        )
    _check_not_built(wrapper, optimizer)
    return optimizer


def _check_not_built(
    wrapper: str, optimizer: keras.optimizers.Optimizer
) -> None:
    for each in optimizers.with_nested(optimizer):
        if each.built:
            raise ValueError(
                f"{wrapper} builds the inner optimizer on its own float32 "
                f"variables. Received: inner_optimizer={each.name!r}, which "
                "is built already. Pass a fresh one, for example "
                f"{type(each).__name__}.from_config(optimizer.get_config())."
            )
