"""The optimizer that scales the loss and skips steps that overflowed."""

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from tfmix import _arguments
from tfmix.scaling import (
    construction,
    delegation,
    finite,
    gradients,
    health,
    storage,
    strategy,
    unscaled,
)

# How the variables of a loss scale's state are called in Keras's own class,
# so that a checkpoint written by either can be read by tfmix.
_KERAS_NAMES = {"scale": "dynamic_scale", "good_steps": "step_counter"}


@keras.saving.register_keras_serializable(package="tfmix")
class LossScaleOptimizer(delegation.DelegatesToInner):
    """Wraps any Keras optimizer with loss scaling that survives every fault.

    A drop-in for `keras.optimizers.LossScaleOptimizer`. In each step the
    gradients are summed over all replicas, divided by the loss scale in
    float32 and checked. If every number of every gradient is finite, the
    inner optimizer applies them; if not, no variable, slot, counter or
    average changes on any replica, and the loss scale reacts.

    Args:
        inner_optimizer: A `keras.optimizers.Optimizer`, or the name of one
            (`"adam"`). Clipping, weight decay, EMA and gradient accumulation
            are its arguments; clipping then acts on true, summed gradients.
        initial_scale: Float, the first loss scale of the dynamic rule.
            Defaults to `2.0**15`.
        dynamic_growth_steps: Integer, finite steps before the dynamic scale
            doubles. Defaults to `2000`.
        loss_scale: `"dynamic"`, a positive number for a fixed scale, or a
            `tfmix.LossScale` object, which then holds all settings.
            Defaults to `"dynamic"`.
        name: String. Defaults to `"loss_scale_optimizer"`.

    Attributes:
        inner_optimizer: The wrapped optimizer. `learning_rate`, `iterations`
            and every attribute this class has not, such as `beta_1`, are its.
        loss_scale: Float, the scale in force. Reading it copies a scalar to
            the host. It can be set.
        skipped_steps: Integer, steps not applied so far.
        consecutive_skips: Integer, steps not applied since the last that was.
        overflow_counts: Dict from variable path to the number of skipped
            steps in which that variable's gradient was not finite.

    Raises:
        TypeError: If `inner_optimizer` is no Keras 3 optimizer, or a setting
            is not a number.
        ValueError: If a setting is out of range, contradicts another, or
            belongs to the inner optimizer; or under a distribution strategy
            that cannot skip a step on all replicas.

    Example:
        >>> model = keras.Sequential([keras.layers.Dense(1)])
        >>> optimizer = LossScaleOptimizer(keras.optimizers.Adam(1e-3))
        >>> model.compile(optimizer, loss="mse")
        >>> history = model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
        >>> optimizer.loss_scale, optimizer.skipped_steps
        (32768.0, 0)

    In a loop of your own, scale the loss before differentiating it and give
    the gradients to `apply` as they are:

        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(compute_loss())
        grads = tape.gradient(loss, model.trainable_variables)
        applied = optimizer.apply(grads, model.trainable_variables)
    """

    def __init__(
        self,
        inner_optimizer: Any,
        initial_scale: float | None = None,
        dynamic_growth_steps: int | None = None,
        *,
        loss_scale: Any = "dynamic",
        name: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Checks the arguments and creates the state of the loss scale."""
        construction.refuse_legacy_arguments(kwargs)
        rule = construction.loss_scale_rule(
            loss_scale, initial_scale, dynamic_growth_steps
        )
        inner_optimizer = construction.inner_optimizer(inner_optimizer)
        construction.check_strategy()
        super().__init__(
            inner_optimizer,
            initial_scale=float(rule.init()[0]),
            dynamic_growth_steps=getattr(rule, "growth_steps", None),
            name=name,
            **kwargs,
        )
        self.rule = rule
        self.unscaled_note = unscaled.UnscaledNote()
        self._loss_was_scaled = isinstance(rule, strategy.NoLossScale)
        self._create_state()

    @property
    def loss_scale(self) -> float:
        """The loss scale in force; reading it waits for the device."""
        return float(self.rule.current(tree.map_structure(_host, self.state())))

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        wanted = np.float32(_arguments.positive("loss_scale", value))
        state = self.rule.init()._replace(scale=wanted)
        if float(self.rule.current(state)) != wanted:
            raise ValueError(
                f"{self.rule!r} does not allow this loss scale. "
                f"Received: loss_scale={value!r}."
            )
        self._assign_state(state)

    @property
    def skipped_steps(self) -> int:
        """Steps not applied so far; reading it waits for the device."""
        return int(_host(self._skipped_steps))

    @property
    def consecutive_skips(self) -> int:
        """Steps not applied since the last that was; waits for the device."""
        return int(_host(self._consecutive_skips))

    @property
    def overflow_counts(self) -> dict[str, int]:
        """Skipped steps per variable; reading it waits for the device."""
        if not self.built:
            return {}
        counts = _host(self._overflow_counts).tolist()
        paths = [_path(variable) for variable in self.model_variables]
        return dict(zip(paths, counts, strict=True))

    def check_health(
        self, max_consecutive_skips: int = health.MAX_CONSECUTIVE_SKIPS
    ) -> None:
        """Raises if training is stuck; call it now and then in a long loop.

        Args:
            max_consecutive_skips: Integer. Defaults to `50`: from `2.0**15`
                the scale falls to its floor in 15 steps, from the ceiling in
                24, so this many skips are not the search for a scale.

        Raises:
            LossScaleError: If the scale has reached its floor and steps are
                still skipped, or if that many in a row were skipped. The
                message names the variables whose gradients were not finite
                and says what to change.
        """
        limit = _arguments.count("max_consecutive_skips", max_consecutive_skips)
        health.check(self, limit)

    def scale_loss(self, loss: Any) -> Any:
        """Multiplies a loss by the loss scale, in float32 or wider.

        Args:
            loss: Scalar tensor, number, or a nest of them.

        Returns:
            The scaled loss, of the same structure; float32 where it was
            16-bit, since a float16 loss would overflow at once.

        Example:
            >>> optimizer = LossScaleOptimizer("sgd", loss_scale=8.0)
            >>> float(optimizer.scale_loss(0.5))
            4.0
        """
        self._loss_was_scaled = True
        scale = self.rule.current(self.state())

        def scaled(value: Any) -> Any:
            value = gradients.to_float32(ops.convert_to_tensor(value))
            return ops.multiply(value, ops.cast(scale, value.dtype))

        return tree.map_structure(scaled, loss)

    def unscale_gradients(self, grads: Sequence[Any]) -> list[Any]:
        """Divides gradients by the loss scale, for clipping or logging.

        The next `apply` or `apply_gradients` then divides no more. Under a
        `tf.distribute` strategy these are still this replica's gradients: to
        clip the sum over all replicas, give `global_clipnorm` to the inner
        optimizer instead.

        Args:
            grads: Scaled gradients; `None` where there is none.

        Returns:
            A list of the true gradients, float32 where they were 16-bit.

        Example:
            >>> optimizer = LossScaleOptimizer("sgd", loss_scale=8.0)
            >>> weight = keras.Variable([1.0])
            >>> optimizer.build([weight])
            >>> true = optimizer.unscale_gradients([ops.array([16.0])])
            >>> float(true[0][0])
            2.0
        """
        grads = list(grads)
        scale = self.rule.current(self.state())
        variables = self.model_variables if self.built else [None] * len(grads)
        if len(variables) != len(grads):
            variables = [None] * len(grads)
        grads = gradients.unscale_all(grads, variables, scale)
        self.unscaled_note.leave(finite.all_finite(grads))
        return grads

    def apply(
        self, grads: Sequence[Any], trainable_variables: Any = None
    ) -> Any:
        """Applies scaled gradients if all are finite; else skips the step.

        Args:
            grads: Gradients of the scaled loss, one per variable, dense or
                `tf.IndexedSlices`; `None` where there is none.
            trainable_variables: The variables. Defaults to those that the
                optimizer was built with; on the first call they build it.

        Returns:
            Boolean scalar tensor, whether the step was applied. Nothing is
            copied to the host.

        Raises:
            ValueError: If there is no gradient at all, a variable is unknown,
                or the call stands outside of `strategy.run`.
        """
        grads = list(grads)
        if not grads:
            return ops.convert_to_tensor(False)
        variables = self._variables_to_update(grads, trainable_variables)
        self._warn_if_loss_was_not_scaled()
        if keras.backend.backend() == "tensorflow":
            from tfmix.scaling import tensorflow_step as step
        else:
            from tfmix.scaling import jax_step as step
        return step.apply(self, grads, variables)

    def apply_gradients(self, grads_and_vars: Iterable[Any]) -> Any:
        """Applies scaled gradients, like `apply`, as Keras's `fit` calls it.

        Args:
            grads_and_vars: Pairs of a gradient and its variable.

        Returns:
            The inner optimizer's count of iterations, for compatibility.
        """
        pairs = list(grads_and_vars)
        self.apply([pair[0] for pair in pairs], [pair[1] for pair in pairs])
        return self.iterations

    def stateless_apply(
        self,
        optimizer_variables: Sequence[Any],
        grads: Sequence[Any],
        trainable_variables: Sequence[Any],
    ) -> tuple[list[Any], list[Any]]:
        """Returns the values after the step; changes nothing (JAX).

        Args:
            optimizer_variables: Current values of `optimizer.variables`.
            grads: Gradients of the scaled loss, one per trainable variable.
            trainable_variables: Current values of the model's variables.

        Returns:
            The new values of the model's variables and of the optimizer's.

        Raises:
            ValueError: If the optimizer is not built, the counts differ, or
                the backend is TensorFlow.
        """
        if keras.backend.backend() != "jax":
            raise ValueError(
                "`stateless_apply` needs the JAX backend; under TensorFlow "
                "call `optimizer.apply(grads, variables)`. Received: "
                f"backend={keras.backend.backend()!r}."
            )
        if not self.built:
            raise ValueError(
                "`stateless_apply` needs a built optimizer. Call "
                "`optimizer.build(model.trainable_variables)` first."
            )
        from tfmix.scaling import jax_step

        self._warn_if_loss_was_not_scaled()
        return jax_step.stateless_apply(
            self, list(optimizer_variables), list(grads), trainable_variables
        )

    def build(self, variables: Sequence[Any]) -> None:
        """Creates the inner optimizer's slots and the overflow counts.

        Args:
            variables: The model's trainable variables.
        """
        if self.built:
            return
        variables = list(variables)
        self.inner_optimizer.build(variables)
        self._overflow_counts = self._counter(
            "overflow_counts", shape=(len(variables),)
        )
        # In place: Keras would take an assigned list for its own variables.
        self._trainable_variables.extend(variables)
        for position, variable in enumerate(variables):
            key = self._var_key(variable)
            self._trainable_variables_indices[key] = position
        self.built = True

    @property
    def own_variables(self) -> list[Any]:
        """The variables of the loss scale and its counters."""
        return list(self._variables)

    @property
    def model_variables(self) -> list[Any]:
        """The model's variables that the optimizer was built with."""
        return list(self._trainable_variables)

    @property
    def consecutive_skips_variable(self) -> Any:
        """The variable behind `consecutive_skips`; zero after a good step."""
        return self._consecutive_skips

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Sets all of `optimizer.variables`, or none.

        Args:
            weights: One array for each of `optimizer.variables`.

        Raises:
            ValueError: If the optimizer is not built, or a count or a shape
                differs.
        """
        if not self.built:
            raise ValueError(
                "`set_weights` needs a built optimizer. Call "
                "`optimizer.build(model.trainable_variables)` first."
            )
        storage.assign_all(self.variables, weights)

    def save_own_variables(self, store: Any) -> None:
        """Writes the whole state, the inner optimizer's included."""
        storage.save(store, self.own_variables, self.inner_optimizer.variables)

    def load_own_variables(self, store: Any) -> None:
        """Reads the whole state; also one that Keras's class has written.

        Raises:
            ValueError: If it does not fit. Nothing is changed then.
        """
        storage.load(store, self.own_variables, self.inner_optimizer.variables)

    def get_config(self) -> dict[str, Any]:
        """Returns the settings; a default rule's in Keras's own form."""
        serialize = keras.saving.serialize_keras_object
        config = {
            "name": self.name,
            "inner_optimizer": serialize(self.inner_optimizer),
        }
        keras_form = {
            "initial_scale": self.initial_scale,
            "dynamic_growth_steps": self.dynamic_growth_steps,
        }
        if construction.is_rule_of(self.rule, **keras_form):
            return config | keras_form
        return config | {"loss_scale": serialize(self.rule)}

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Any = None
    ) -> "LossScaleOptimizer":
        """Returns the optimizer that `get_config` described."""
        config = dict(config)
        for key in ("inner_optimizer", "loss_scale"):
            if isinstance(config.get(key), dict):
                config[key] = keras.saving.deserialize_keras_object(
                    config[key], custom_objects=custom_objects
                )
        return cls(**config)

    def get_scaled_loss(self, loss: Any) -> Any:
        """Does what `scale_loss` does, under its name in the old tf.keras."""
        return self.scale_loss(loss)

    def get_unscaled_gradients(self, grads: Sequence[Any]) -> list[Any]:
        """Does what `unscale_gradients` does, by its old tf.keras name.

        Code written for tf.keras goes on to call `apply_gradients`, which
        then does not divide again.
        """
        return self.unscale_gradients(grads)

    def state(self) -> Any:
        """Returns the rule's state as its named tuple of variables' values."""
        return self._state_type(*(v.value for v in self._state_variables()))

    def record(self, state: Any, applied: bool) -> None:
        """Moves the loss scale and the counters on by one step.

        Args:
            state: What `state()` returned before the step.
            applied: Bool, known because both outcomes are traced apart.
        """
        self._assign_state(self.rule.update(state, applied))
        if applied:
            self._consecutive_skips.assign(0)
        else:
            self._consecutive_skips.assign(self._consecutive_skips + 1)
            self._skipped_steps.assign(self._skipped_steps + 1)

    def count_overflows(
        self, grads: Sequence[Any], variables: Sequence[Any]
    ) -> None:
        """Counts the variables whose gradient is not finite, on a skip."""
        by_key = {
            self._var_key(variable): gradient
            for variable, gradient in zip(variables, grads, strict=True)
            if gradient is not None
        }
        bad = [
            ops.logical_not(finite.is_finite(by_key[key]))
            if (key := self._var_key(variable)) in by_key
            else ops.convert_to_tensor(False)
            for variable in self.model_variables
        ]
        counts = self._overflow_counts
        counts.assign(counts + ops.cast(ops.stack(bad), counts.dtype))

    def last_step_applied(self) -> Any:
        """Returns a boolean scalar tensor; nothing is copied to the host."""
        return ops.equal(self._consecutive_skips.value, 0)

    def _create_state(self) -> None:
        initial = self.rule.init()
        self._state_type = type(initial)
        # Keras's order, so that its files can be read by position.
        fields = sorted(initial._fields, key=lambda name: name != "good_steps")
        for field in fields:
            value = getattr(initial, field)
            variable = self.add_variable(
                shape=np.shape(value),
                dtype="int" if isinstance(value, np.integer) else "float32",
                initializer=keras.initializers.Constant(value),
                name=_KERAS_NAMES.get(field, field),
            )
            setattr(self, _attribute(field), variable)
        self._skipped_steps = self._counter("skipped_steps")
        self._consecutive_skips = self._counter("consecutive_skips")

    def _counter(self, name: str, shape: tuple[int, ...] = ()) -> Any:
        return self.add_variable(
            shape=shape, dtype="int32", initializer="zeros", name=name
        )

    def _state_variables(self) -> list[Any]:
        fields = self._state_type._fields
        return [vars(self)[_attribute(field)] for field in fields]

    def _assign_state(self, state: Any) -> None:
        for variable, value in zip(self._state_variables(), state, strict=True):
            variable.assign(value)

    def _variables_to_update(
        self, grads: Sequence[Any], trainable_variables: Any
    ) -> list[Any]:
        if trainable_variables is not None:
            variables = list(trainable_variables)
            if not self.built:
                self.build(variables)
            self._check_variables_are_known(variables)
        elif self.built:
            variables = self.model_variables
        else:
            raise ValueError(
                "The optimizer is not built yet, so it must be told which "
                "variables the gradients belong to. Write "
                "optimizer.apply(grads, model.trainable_variables)."
            )
        if len(grads) != len(variables):
            raise ValueError(
                "There must be one gradient (or None) for each variable. "
                f"Received: {len(grads)} gradients for {len(variables)} "
                "variables."
            )
        if all(gradient is None for gradient in grads):
            raise ValueError(
                "No gradients provided for any variable: all are None. Is "
                "the loss computed from the model's variables, inside the "
                "gradient tape?"
            )
        return variables

    def _warn_if_loss_was_not_scaled(self) -> None:
        if self._loss_was_scaled:
            return
        self._loss_was_scaled = True
        warnings.warn(
            "The gradients are divided by the loss scale, but the loss was "
            "never multiplied by it, so every update is too small by that "
            "factor. Write `loss = optimizer.scale_loss(loss)` inside the "
            "gradient tape (or inside the function given to jax.grad).",
            stacklevel=4,
        )


def _attribute(field: str) -> str:
    return _KERAS_NAMES.get(field, f"_loss_scale_{field}")


def _host(value: Any) -> np.ndarray:
    return np.asarray(ops.convert_to_numpy(value))


def _path(variable: Any) -> str:
    return getattr(variable, "path", variable.name)
