"""The base class of optimizers that update 16-bit variables in float32."""

import contextlib
import functools
import numbers
import random
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from tfmix._keras import optimizers
from tfmix._keras import variables as keras_variables
from tfmix.loss_scaling import inner_attributes
from tfmix.optimizers import eight_bit_slots, noise
from tfmix.step import replicas

Variables = keras_variables.Variables


class Float32Weights:
    """Float32 weights that the inner optimizer updates for 16-bit variables.

    A subclass creates them, and decides where the bits are stored that do not
    fit into 16. Other variables have none.
    """

    def __init__(
        self, optimizer: "SixteenBitOptimizer", model_variables: Variables
    ) -> None:
        self.optimizer = optimizer
        self.narrow = [*filter(keras_variables.is_sixteen_bit, model_variables)]
        self.float32_weights = self.make()

    def make(self) -> dict[int, keras.Variable]:
        """Returns the weight of each of the `narrow` variables, by `id`."""
        return {id(v): self.make_one(v) for v in self.narrow}

    def make_one(self, variable: keras.Variable) -> keras.Variable:
        """Creates the float32 weight of a variable."""
        raise NotImplementedError

    def refresh(self) -> None:
        """Updates the weights with values assigned to model variables."""

    def write_back(self) -> None:
        """Copies the inner optimizer's update to the model's variables."""

    def target(self, variable: keras.Variable) -> keras.Variable:
        """Returns a variable's weight, or the variable if it has none."""
        return self.float32_weights.get(id(variable), variable)

    def targets(self, these: Variables) -> list[keras.Variable]:
        """Returns the weights of some variables, if they have no others."""
        return [self.target(variable) for variable in these]

    def creating_slots(self) -> contextlib.AbstractContextManager:
        """A context in which the inner optimizer is built."""
        return contextlib.nullcontext()

    def route(self, grads: Sequence, of: Variables) -> tuple[list, list]:
        """Returns the inner optimizer's gradients and their variables."""
        return self.widen(grads, of), self.targets(of)

    def widen(self, grads: Sequence, of: Variables) -> list:
        """Casts the gradients of variables with float32 weights to float32."""
        return [
            ops.cast(grad, "float32")
            if grad is not None and id(variable) in self.float32_weights
            else grad
            for grad, variable in zip(grads, of, strict=True)
        ]

    def read(self, variable: keras.Variable) -> Any:
        """Returns the float32 value behind a model's variable."""
        return ops.cast(self.target(variable), "float32")

    def assign(self, variable: keras.Variable, value: Any) -> None:
        """Sets the float32 value behind a variable, and the variable."""
        self.target(variable).assign(value)
        variable.assign(ops.cast(value, variable.dtype))


class SixteenBitOptimizer(
    optimizers.AveragesOfInner,
    inner_attributes.DelegatesToInner,
    keras.optimizers.Optimizer,
):
    """Makes an inner optimizer update 16-bit variables in float32."""

    # These are class attributes, so that setting them does not reach an inner
    # optimizer with attributes of the same names.
    slot_dtype: eight_bit_slots.Rules = "float32"
    seed: int | None = None
    seed_variable: keras.Variable | None = None

    def __init__(
        self,
        inner_optimizer: Any,
        name: str | None = None,
        slot_dtype: eight_bit_slots.Rules = "float32",
        seed: int | None = None,
        draws: bool = False,
    ) -> None:
        inner_optimizer = _check_inner(type(self).__name__, inner_optimizer)
        slot_dtype = eight_bit_slots.check(slot_dtype)
        draws = draws or eight_bit_slots.has_eight_bits(slot_dtype)
        if seed is not None and not draws:
            raise ValueError(
                f"{type(self).__name__} draws no random numbers here. "
                f"Received: seed={seed!r}. Leave `seed` out."
            )
        super().__init__(learning_rate=0.0, name=name)
        self.inner_optimizer = inner_optimizer
        self.slot_dtype = slot_dtype
        if draws:
            self.seed = _check_seed(seed)
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

    def make_float32_weights(
        self, model_variables: Variables
    ) -> Float32Weights:
        """Creates the float32 weights of the model's 16-bit variables."""
        raise NotImplementedError

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
        _check_not_built(type(self).__name__, self.inner_optimizer)
        variables = list(variables)
        optimizers.remember(self, variables)
        with keras_variables.outside_of_tracing(variables):
            self._store = self.make_float32_weights(variables)
            # Keras excludes variables from weight decay by identity, so the
            # float32 weights must be excluded, too.
            for worker in optimizers.workers(self.inner_optimizer):
                if excluded := optimizers.undecayed(worker, variables):
                    targets = self._store.targets(excluded)
                    worker.exclude_from_weight_decay(var_list=targets)
            with self._store.creating_slots(), self._creating_eight_bits():
                self.inner_optimizer.build(self._store.targets(variables))
        self.built = True

    def _creating_eight_bits(self) -> contextlib.AbstractContextManager:
        if not eight_bit_slots.has_eight_bits(self.slot_dtype):
            return contextlib.nullcontext()
        return eight_bit_slots.creating(
            self.inner_optimizer,
            functools.partial(eight_bit_slots.keeps_float32, self.slot_dtype),
            self.draw_noise,
        )

    def scale_loss(self, loss: Any) -> Any:
        """Scales the loss like the inner optimizer."""
        return self.inner_optimizer.scale_loss(loss)

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
            self._store.refresh()
            routed, targets = self._store.route(grads, variables)
            self.inner_optimizer.apply(routed, targets)
            self._store.write_back()

    def finalize_variable_values(self, var_list: Variables) -> None:
        """Assigns the inner optimizer's final (averaged) weights."""
        if not self.built:
            return
        self._store.refresh()
        for target, average in optimizers.averages(self.inner_optimizer):
            target.assign(average)
        self._store.write_back()

    def read_float32(self, variable: keras.Variable) -> Any:
        """Returns the float32 value behind a model's variable, as a tensor.

        Args:
            variable: One of those that the optimizer was built with.

        Raises:
            ValueError: If the optimizer was not built with the variable.
        """
        (variable,) = optimizers.recognised(self, [variable])
        self._store.refresh()
        return self._store.read(variable)

    def assign_float32(self, variable: keras.Variable, value: Any) -> None:
        """Sets the float32 value behind a model's variable, and the variable.

        Args:
            variable: One of those that the optimizer was built with.
            value: Array or tensor of the variable's shape; cast to float32.

        Raises:
            ValueError: If the optimizer was not built with the variable.
        """
        (variable,) = optimizers.recognised(self, [variable])
        self._store.assign(variable, ops.convert_to_tensor(value, "float32"))

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
        if self.slot_dtype != "float32":
            config["slot_dtype"] = self.slot_dtype
        return config | ({} if self.seed is None else {"seed": self.seed})

    @classmethod
    def from_config(
        cls, config: dict, custom_objects: dict | None = None
    ) -> "SixteenBitOptimizer":
        """Creates the optimizer, without state, from `get_config()`."""
        config = dict(config)
        optimizer = keras.saving.deserialize_keras_object(
            config.pop("inner_optimizer"), custom_objects=custom_objects
        )
        return cls(optimizer, **config)


def owner(optimizer: Any) -> SixteenBitOptimizer | None:
    """Returns the 16-bit optimizer inside an optimizer, if there is one."""
    for candidate in optimizers.with_nested(optimizer):
        if isinstance(candidate, SixteenBitOptimizer):
            return candidate
    return None


def _check_inner(
    wrapper: str, optimizer: keras.optimizers.Optimizer | str | dict
) -> keras.optimizers.Optimizer:
    """Returns the optimizer to wrap; raises an error if it does not fit."""
    optimizer = inner_attributes.checked(optimizer)
    if isinstance(optimizer, optimizers.KerasScaler):
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


def _check_not_built(wrapper: str, optimizer: optimizers.Optimizer) -> None:
    for nested in optimizers.with_nested(optimizer):
        if nested.built:
            raise ValueError(
                f"{wrapper} builds the inner optimizer on its own float32 "
                f"variables. Received: inner_optimizer={nested.name!r}, which "
                "is built already. Pass a fresh one, for example "
                f"{type(nested).__name__}.from_config(optimizer.get_config())."
            )


def _check_seed(seed: int | None) -> int:
    """Checks a seed of 31 bits; draws one for `None`."""
    if seed is None:
        return random.randrange(2**31)
    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral):
        raise TypeError(
            f"`seed` must be an integer or None. Received: seed={seed!r}."
        )
    if not 0 <= seed < 2**31:
        raise ValueError(
            f"`seed` must lie from 0 to 2**31 - 1. Received: seed={seed!r}."
        )
    return int(seed)
