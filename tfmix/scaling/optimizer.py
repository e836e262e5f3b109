"""The optimizer that scales the loss and skips steps that overflowed."""

from collections.abc import Iterable, Sequence
from typing import Any

import keras
from keras import ops, tree

from tfmix import _arguments
from tfmix._keras import autograph
from tfmix.scaling import (
    configuration,
    health,
    loop_checks,
    rules,
    scale_state,
    settings,
)
from tfmix.scaling.step import blocks, unscale, unscaled


@keras.saving.register_keras_serializable(package="tfmix")
class LossScaleOptimizer(scale_state.KeepsScaleState):
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
        loss_scale: `"dynamic"`, a positive number for a fixed scale, a
            `tfmix.LossScale` object, which then holds all settings, or a
            `LossScaleOptimizer` whose scale this one is to share: either
            lowers it, and the other one's steps let it grow. Defaults to
            `"dynamic"`.
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
        >>> history = model.fit(ops.ones((4, 2)), ops.ones((4, 1)), verbose=0)
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
        settings.refuse_legacy_arguments(kwargs)
        leader = None
        if isinstance(loss_scale, LossScaleOptimizer):
            leader, loss_scale = loss_scale, loss_scale.rule
        rule = settings.loss_scale_rule(
            loss_scale, initial_scale, dynamic_growth_steps
        )
        inner_optimizer = settings.inner_optimizer(inner_optimizer)
        settings.check_strategy()
        super().__init__(
            inner_optimizer,
            initial_scale=float(rule.init()[0]),
            dynamic_growth_steps=getattr(rule, "growth_steps", None),
            name=name,
            **kwargs,
        )
        self.unscaled_note = unscaled.UnscaledNote()
        self.guarded = self.in_guarded_step = False
        self.loss_was_scaled = isinstance(rule, rules.NoLossScale)
        self.create_state(rule, leader)

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

    @autograph.untouched
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
        self.loss_was_scaled = True
        scale = self.rule.current(self.state())

        def scaled(value: Any) -> Any:
            value = unscale.to_float32(ops.convert_to_tensor(value))
            return ops.multiply(value, ops.cast(scale, value.dtype))

        return tree.map_structure(scaled, loss)

    @autograph.untouched
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
        variables = self._trainable_variables
        if len(variables) != len(grads):
            variables = [None] * len(grads)
        true = blocks.unscaled(grads, variables, scale)
        self.unscaled_note.leave(blocks.all_finite(true))
        return blocks.parts(true, len(grads))

    @autograph.untouched
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
        variables = loop_checks.variables_to_update(
            self, grads, trainable_variables
        )
        loop_checks.warn_unless_loss_was_scaled(self)
        loop_checks.warn_unless_guarded(self)
        if keras.backend.backend() == "tensorflow":
            from tfmix.scaling.step import tensorflow_step

            return tensorflow_step.apply(self, grads, variables)
        from tfmix.scaling.step import jax_step

        return jax_step.apply(self, grads, variables)

    @autograph.untouched
    def apply_gradients(self, grads_and_vars: Iterable[Any]) -> Any:
        """Does what `apply` does with pairs of a gradient and its variable.

        Returns the inner optimizer's count of iterations, as Keras does.
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
        from tfmix.scaling.step import jax_step

        loop_checks.warn_unless_loss_was_scaled(self)
        loop_checks.warn_unless_guarded(self)
        return jax_step.stateless_apply(
            self,
            list(optimizer_variables),
            list(grads),
            list(trainable_variables),
        )

    def get_config(self) -> dict[str, Any]:
        """Returns the settings; a default rule's in Keras's own form."""
        return configuration.to_config(self)

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Any = None
    ) -> "LossScaleOptimizer":
        """Returns the optimizer that `get_config` described."""
        config = configuration.deserialized(config, custom_objects)
        guarded = config.pop("guarded", False)
        optimizer = cls(**config)
        optimizer.guarded = guarded
        return optimizer

    def get_scaled_loss(self, loss: Any) -> Any:
        """Does what `scale_loss` does, by its old tf.keras name."""
        return self.scale_loss(loss)

    def get_unscaled_gradients(self, grads: Sequence[Any]) -> list[Any]:
        """Does what `unscale_gradients` does, by its old tf.keras name."""
        return self.unscale_gradients(grads)
