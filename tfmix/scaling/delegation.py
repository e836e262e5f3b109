"""What is asked of the wrapper and meant for the optimizer inside it."""

from collections.abc import Iterable
from typing import Any

import keras

# Settings that Keras's base class keeps on every optimizer, also on a wrapper
# that does not use them.
_SHARED_SETTINGS = (
    "clipnorm",
    "clipvalue",
    "ema_momentum",
    "ema_overwrite_frequency",
    "global_clipnorm",
    "gradient_accumulation_steps",
    "use_ema",
    "weight_decay",
)


class DelegatesToInner(keras.optimizers.LossScaleOptimizer):
    """A Keras wrapper whose hyper-parameters are its inner optimizer's.

    Keras's own passes on the learning rate and the iterations only: there,
    `wrapper.clipnorm` reads `None`, `wrapper.beta_1` fails, and
    `wrapper.exclude_from_weight_decay(...)` excludes nothing.
    """

    def __getattr__(self, name: str) -> Any:
        """Looks an attribute that the wrapper has not up on the inner one."""
        inner = vars(self).get("inner_optimizer")
        if inner is None or name.startswith("_"):
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}"
            )
        return getattr(inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute that only the inner optimizer has there."""
        inner = vars(self).get("inner_optimizer")
        mine = name.startswith("_") or name in vars(self)
        if inner is None or mine or hasattr(type(self), name):
            super().__setattr__(name, value)
        elif hasattr(inner, name):
            setattr(inner, name, value)
        else:
            super().__setattr__(name, value)

    @property
    def loss_scale_factor(self) -> None:
        """Always `None`: the scale is the wrapper's `loss_scale`."""

    @loss_scale_factor.setter
    def loss_scale_factor(self, value: float | None) -> None:
        if value is not None:
            raise ValueError(
                "A `loss_scale_factor` would scale the loss twice. Received: "
                f"loss_scale_factor={value!r}. Set `optimizer.loss_scale`, or "
                f"write LossScaleOptimizer(..., loss_scale={value!r})."
            )

    def exclude_from_weight_decay(
        self,
        var_list: Iterable[Any] | None = None,
        var_names: Iterable[str] | None = None,
    ) -> None:
        """Excludes variables from the inner optimizer's weight decay.

        Args:
            var_list: The variables, or `None`.
            var_names: Strings; a variable whose name contains one of them is
                excluded. Or `None`.

        Raises:
            ValueError: If the optimizer is built already.
        """
        self.inner_optimizer.exclude_from_weight_decay(var_list, var_names)

    def _overwrite_variable_with_gradient(self, variable: Any) -> Any:
        return self.inner_optimizer._overwrite_variable_with_gradient(variable)


def _shared(name: str) -> property:
    def read(self: DelegatesToInner) -> Any:
        return getattr(self.inner_optimizer, name)

    def write(self: DelegatesToInner, value: Any) -> None:
        # Keras's base class sets its defaults before there is an inner one.
        if "inner_optimizer" in vars(self):
            setattr(self.inner_optimizer, name, value)

    return property(read, write, doc=f"The inner optimizer's `{name}`.")


for _name in _SHARED_SETTINGS:
    setattr(DelegatesToInner, _name, _shared(_name))
