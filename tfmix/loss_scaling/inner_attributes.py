"""Checks which optimizer is wrapped, and shares its attributes and settings."""

from collections.abc import Sequence
from typing import Any

import keras

from tfmix import _messages
from tfmix._keras import optimizers, variables

# Every optimizer has these of Keras's base class, even a wrapper that does not
# use them (Keras 3.12.4, 3.15.1).
_SHARED = (
    "clipnorm clipvalue ema_momentum ema_overwrite_frequency "
    "exclude_from_weight_decay global_clipnorm gradient_accumulation_steps "
    "iterations learning_rate use_ema weight_decay"
)


def checked(optimizer: Any) -> keras.optimizers.Optimizer:
    """Returns the optimizer to wrap, from an object, a name or a config."""
    if isinstance(optimizer, dict):
        # Keras changes the config that it gets.
        optimizer = keras.optimizers.get(dict(optimizer))
    elif isinstance(optimizer, str):
        optimizer = keras.optimizers.get(optimizer)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            "`inner_optimizer` must be a keras.optimizers.Optimizer of Keras "
            '3, such as keras.optimizers.Adam(), or a name such as "adam". '
            f"Received: inner_optimizer={optimizer!r} of type "
            f"{type(optimizer).__name__}."
        )
    if isinstance(optimizer, optimizers.KerasScaler):
        raise ValueError(
            "`inner_optimizer` scales the loss, which only the outermost "
            "optimizer may: two scales would be divided out twice, and master "
            f"weights need unscaled gradients. Received: inner_optimizer="
            f"{optimizer!r}. Wrap the optimizer inside it, in the order "
            "LossScaleOptimizer(MasterWeightOptimizer(Adam()))."
        )
    return optimizer


def checked_to_scale(optimizer: Any) -> Any:
    """Returns the optimizer to wrap with a loss scale; see `checked`."""
    optimizer = checked(optimizer)
    if optimizer.loss_scale_factor is not None:
        factor = optimizer.loss_scale_factor
        _messages.warn(
            "the fixed loss_scale_factor=%r of %r is replaced by tfmix's loss "
            "scale. To keep it, write LossScaleOptimizer(..., loss_scale=%r).",
            factor,
            optimizer.name,
            factor,
        )
    return optimizer


class DelegatesToInner(optimizers.OverwritesThroughInner):
    """Mixin for optimizers that leave the update to another optimizer.

    Every public attribute that the class does not declare, and those of
    `_SHARED`, are the inner optimizer's. List it before Keras's class among the
    bases.
    """

    built: bool
    # True if tfmix attached it by itself, and detaches it again.
    is_automatic = False

    def __getattr__(self, name: str) -> Any:
        """Looks up missing attributes on the inner optimizer."""
        # Private names are not delegated: Keras and TensorFlow read them to
        # track each object's own state.
        inner = vars(self).get("inner_optimizer")
        if inner is None or name.startswith("_"):
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}"
            )
        return getattr(inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets attributes that only the inner optimizer has there."""
        inner = vars(self).get("inner_optimizer")
        private = name.startswith("_")
        mine = private or name in vars(self) or hasattr(type(self), name)
        if name == "loss_scale_factor":
            # TensorFlow does not set a value that is there already.
            object.__setattr__(self, name, value)
        elif inner is None or mine or not hasattr(inner, name):
            super().__setattr__(name, value)
        else:
            setattr(inner, name, value)

    @property
    def loss_scale_factor(self) -> float | None:
        """The inner optimizer's fixed loss scale."""
        return self.inner_optimizer.loss_scale_factor

    @loss_scale_factor.setter
    def loss_scale_factor(self, value: float | None) -> None:
        scales = isinstance(self, optimizers.KerasScaler)
        if scales and value is not None:
            raise ValueError(
                "A `loss_scale_factor` would scale the loss twice. Received: "
                f"loss_scale_factor={value!r}. Set `optimizer.loss_scale`, or "
                f"write LossScaleOptimizer(..., loss_scale={value!r})."
            )
        if scales and "inner_optimizer" in vars(self):
            # Keras's own loss scale sets `None` on the optimizer it gets.
            raise ValueError(
                "An optimizer that scales the loss takes no second loss scale "
                "around it: the gradients would be divided by both. Received: "
                f"inner_optimizer={self!r}. Use it without the outer "
                "LossScaleOptimizer."
            )
        _write(self, "loss_scale_factor", value)

    def variables_of(
        self, grads: Sequence, trainable_variables: Sequence | None
    ) -> list[keras.Variable]:
        """Returns the gradients' variables; builds the optimizer on them.

        Raises:
            ValueError: If there are none yet, one is unknown, or their number
                is not that of the gradients.
        """
        if not self.built:
            if trainable_variables is None:
                raise ValueError(
                    "The optimizer is not built yet, so it does not know which "
                    "variables the gradients belong to. Received: "
                    "trainable_variables=None. Write "
                    "optimizer.apply(grads, model.trainable_variables)."
                )
            self.build(list(trainable_variables))
        known = optimizers.remembered(self)
        if trainable_variables is not None:
            # This finds the objects that `build` received.
            known = optimizers.recognised(self, list(trainable_variables))
        if len(grads) != len(known):
            raise ValueError(
                "There must be one gradient (or None) for each variable. "
                f"Received: {len(grads)} gradients for {len(known)} variables."
            )
        return known

    def set_weights(self: Any, weights: Sequence) -> None:
        """Sets all of `optimizer.variables`, one array each, or none.

        Raises:
            ValueError: If an array does not fit.
        """
        variables.assign_all(self.variables, weights)


def _shared(name: str) -> property:
    return property(
        lambda self: getattr(self.inner_optimizer, name),
        lambda self, value: _write(self, name, value),
        doc=f"The inner optimizer's `{name}`.",
    )


def _write(wrapper: DelegatesToInner, name: str, value: Any) -> None:
    # Keras's base class sets its defaults before the inner one exists.
    if "inner_optimizer" in vars(wrapper):
        setattr(wrapper.inner_optimizer, name, value)


for _name in _SHARED.split():
    setattr(DelegatesToInner, _name, _shared(_name))
