"""The two columns of the table: how each system is put into a script."""

import abc
from collections.abc import Sequence
from typing import Any

import keras

import tfmix


class System(abc.ABC):
    """How a user of one library writes what the faults need."""

    name: str

    @abc.abstractmethod
    def wrap(self, optimizer: Any, **settings: Any) -> Any:
        """Wraps an optimizer; the settings are those both classes have."""

    @abc.abstractmethod
    def fixed(self, optimizer: Any, scale: float) -> Any:
        """Returns an optimizer with a fixed loss scale."""

    @abc.abstractmethod
    def guard(self, model: Any) -> Any:
        """Protects a compiled model's train step, where that exists."""

    @abc.abstractmethod
    def unscale(self, optimizer: Any, grads: Sequence[Any]) -> list[Any]:
        """Returns gradients a user may clip, before `optimizer.apply`."""

    @abc.abstractmethod
    def set_policy(self, policy: Any) -> None:
        """Sets the global dtype policy."""

    @abc.abstractmethod
    def callbacks(self) -> list[Any]:
        """Returns what the library offers to watch a `fit`."""


class Keras(System):
    """Keras's own classes, and nothing where it has nothing."""

    name = "Keras"

    def wrap(self, optimizer: Any, **settings: Any) -> Any:
        return keras.optimizers.LossScaleOptimizer(optimizer, **settings)

    def fixed(self, optimizer: Any, scale: float) -> Any:
        # What the error on `dynamic=False` recommends.
        optimizer.loss_scale_factor = scale
        return optimizer

    def guard(self, model: Any) -> Any:
        return model

    def unscale(self, optimizer: Any, grads: Sequence[Any]) -> list[Any]:
        return list(grads)

    def set_policy(self, policy: Any) -> None:
        keras.config.set_dtype_policy(policy)

    def callbacks(self) -> list[Any]:
        return []


class Tfmix(System):
    """tfmix's classes."""

    name = "tfmix"

    def wrap(self, optimizer: Any, **settings: Any) -> Any:
        return tfmix.LossScaleOptimizer(optimizer, **settings)

    def fixed(self, optimizer: Any, scale: float) -> Any:
        return tfmix.LossScaleOptimizer(optimizer, loss_scale=scale)

    def guard(self, model: Any) -> Any:
        return tfmix.guard(model)

    def unscale(self, optimizer: Any, grads: Sequence[Any]) -> list[Any]:
        return optimizer.unscale_gradients(grads)

    def set_policy(self, policy: Any) -> None:
        tfmix.set_global_policy(policy)

    def callbacks(self) -> list[Any]:
        return [tfmix.callbacks.LossScaleMonitor()]


SYSTEMS = (Keras(), Tfmix())


def by_name(name: str) -> System:
    """Returns the system of that name."""
    return {system.name: system for system in SYSTEMS}[name]
