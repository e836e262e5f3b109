"""An optimizer that drives another one and looks like it from outside."""

from collections.abc import Sequence
from typing import Any

import keras

# Settings that `keras.optimizers.Optimizer.__init__` puts on every instance.
# On a wrapper they would hide the inner optimizer's (Keras 3.12.4, 3.15.1).
SHARED_SETTINGS = (
    "weight_decay",
    "clipnorm",
    "global_clipnorm",
    "clipvalue",
    "use_ema",
    "ema_momentum",
    "ema_overwrite_frequency",
    "loss_scale_factor",
    "gradient_accumulation_steps",
)


class OptimizerWrapper(keras.optimizers.Optimizer):
    """Base of the optimizers that leave the update to another one.

    Hyper-parameters, the learning rate, `iterations` and every other public
    attribute are read from and written to the inner optimizer; `variables`
    holds the wrapper's state, then the inner optimizer's.

    Args:
        inner_optimizer: A `keras.optimizers.Optimizer`, its name or config.
        name: String. Defaults to the snake-case class name.

    Raises:
        ValueError: If `inner_optimizer` is built, is a loss-scale optimizer
            or wraps 16-bit variables itself.
        TypeError: If `inner_optimizer` is no optimizer.
    """

    def __init__(self, inner_optimizer: Any, name: str | None = None) -> None:
        inner_optimizer = checked_inner(type(self).__name__, inner_optimizer)
        super().__init__(learning_rate=0.0, name=name)
        for setting in SHARED_SETTINGS:
            delattr(self, setting)
        self.inner_optimizer = inner_optimizer

    def __getattr__(self, name: str) -> Any:
        # Private names stay here: Keras and TensorFlow probe them to track
        # each object's own state.
        if name.startswith("_") or "inner_optimizer" not in self.__dict__:
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}"
            )
        return getattr(self.inner_optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        optimizer = self.__dict__.get("inner_optimizer")
        if optimizer is not None and self._is_inner_setting(name, optimizer):
            setattr(optimizer, name, value)
        else:
            super().__setattr__(name, value)

    def _is_inner_setting(self, name: str, optimizer: Any) -> bool:
        if name.startswith("_") or name in self.__dict__:
            return False
        return not hasattr(type(self), name) and hasattr(optimizer, name)

    @property
    def variables(self) -> list:
        """The wrapper's own variables, then the inner optimizer's."""
        return self._variables + self.inner_optimizer.variables

    @property
    def learning_rate(self) -> Any:
        """The inner optimizer's learning rate, schedule already applied."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: Any) -> None:
        self.inner_optimizer.learning_rate = learning_rate

    @property
    def iterations(self) -> Any:
        """The inner optimizer's count of applied steps."""
        return self.inner_optimizer.iterations

    def exclude_from_weight_decay(
        self, var_list: Any = None, var_names: Any = None
    ) -> None:
        """Excludes model variables from the inner optimizer's weight decay.

        Args:
            var_list: List of model variables. Defaults to `None`.
            var_names: List of patterns of names. Defaults to `None`.
        """
        self.inner_optimizer.exclude_from_weight_decay(
            var_list=var_list, var_names=var_names
        )

    def scale_loss(self, loss: Any) -> Any:
        """Scales the loss as the inner optimizer does.

        Args:
            loss: Scalar tensor of any float dtype.

        Returns:
            A scalar tensor.
        """
        return self.inner_optimizer.scale_loss(loss)

    def set_weights(self, weights: Sequence) -> None:
        """Sets every variable of the wrapper and of the inner optimizer.

        Args:
            weights: List of arrays in the order of `variables`.

        Raises:
            ValueError: If the optimizer is not built, or the number of arrays
                or a shape does not match.
        """
        variables = self.variables
        if not self.built or len(weights) != len(variables):
            raise ValueError(
                f"`set_weights` needs a built optimizer and one array per "
                f"variable. Received: {len(weights)} arrays for "
                f"{len(variables)} variables, built={self.built}. Call "
                "`build(model.trainable_variables)` first."
            )
        for variable, weight in zip(variables, weights, strict=True):
            if tuple(variable.shape) != tuple(weight.shape):
                raise ValueError(
                    f"Variable {variable.path!r} has shape "
                    f"{tuple(variable.shape)}. Received: an array of shape "
                    f"{tuple(weight.shape)}."
                )
            variable.assign(weight)

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
    ) -> "OptimizerWrapper":
        """Creates the optimizer from `get_config()`'s dictionary.

        Args:
            config: Dictionary; it is left as it was.
            custom_objects: Dictionary of names to classes, for the inner
                optimizer. Defaults to `None`.

        Returns:
            An optimizer without state.
        """
        config = dict(config)
        optimizer = keras.saving.deserialize_keras_object(
            config.pop("inner_optimizer"), custom_objects=custom_objects
        )
        return cls(optimizer, **config)


def checked_inner(wrapper: str, optimizer: Any) -> keras.optimizers.Optimizer:
    """Returns the optimizer to wrap, or says why it cannot be wrapped.

    Args:
        wrapper: Name of the wrapping class, for the message.
        optimizer: A `keras.optimizers.Optimizer`, its name or config.

    Returns:
        An unbuilt `keras.optimizers.Optimizer`.

    Raises:
        ValueError: If the order of wrapping is wrong or `optimizer` is built.
        TypeError: If `optimizer` is no optimizer.
    """
    if isinstance(optimizer, (str, dict)):
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
    if isinstance(optimizer, OptimizerWrapper):
        raise ValueError(
            f"{wrapper} cannot wrap {type(optimizer).__name__}: both would "
            "keep the same 16-bit variables. Received: inner_optimizer="
            f"{optimizer.name!r}. Keep one of the two."
        )
    if optimizer.built:
        raise ValueError(
            f"{wrapper} builds the inner optimizer on its own float32 "
            f"variables. Received: inner_optimizer={optimizer.name!r}, which "
            "is built already. Pass a fresh one, for example "
            f"{type(optimizer).__name__}.from_config(optimizer.get_config())."
        )
    return optimizer
