"""Averages of weights (`use_ema=True`) and the callback that swaps them."""

import contextlib
from collections.abc import Callable
from typing import Any

import keras

from tfmix._keras import optimizers, replacements


def are_kept(optimizer: optimizers.Optimizer) -> bool:
    """Says whether an optimizer averages the weights it updates."""
    return any(worker.use_ema for worker in optimizers.workers(optimizer))


def pairs(optimizer: optimizers.Optimizer) -> list[tuple[Any, Any]]:
    """Returns what a built optimizer updates, each with its average."""
    return [
        pair
        for worker in optimizers.workers(optimizer)
        if worker.use_ema
        for pair in zip(
            worker._trainable_variables,
            worker._model_variables_moving_average,
            strict=True,
        )
        if pair[1] is not None
    ]


class AveragesOfInner:
    """Mixin: lets Keras's callback find the averages of what is inside."""

    inner_optimizer: optimizers.Optimizer

    @property
    def _model_variables_moving_average(self) -> Any:
        return self.inner_optimizer._model_variables_moving_average


def swap_by(
    undo: contextlib.ExitStack,
    callback: keras.callbacks.SwapEMAWeights,
    swap: Callable[[], None],
    overwrite: Callable[[], None],
) -> None:
    """Lets a callback swap by other functions until a stack unwinds."""

    def acting(action: Callable[[], None]) -> Callable[[], None]:
        def act() -> None:
            # Asking for its model brings the variables up to date on JAX.
            if callback.model is not None:
                action()

        return act

    swapping, overwriting = acting(swap), acting(overwrite)
    replacements.swap(undo, callback, "_swap_variables", swapping)
    replacements.swap(undo, callback, "_finalize_ema_values", overwriting)
