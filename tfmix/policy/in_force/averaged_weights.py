"""`SwapEMAWeights` swaps the float32 weights behind 16-bit variables."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import keras

from tfmix._keras import optimizers, replacements, training
from tfmix.variables import sixteen_bit_optimizer


def swapped(
    model: keras.Model, original: Callable, *args: Any, **kwargs: Any
) -> Any:
    """Calls `fit`, `evaluate` or `predict`, whose callbacks may swap."""
    owner = sixteen_bit_optimizer.owner(getattr(model, "optimizer", None))
    if owner is None or not optimizers.keeps_averages(owner.inner_optimizer):
        return original(*args, **kwargs)
    actions = {
        "_swap_variables": owner.swap_averages,
        "_finalize_ema_values": owner.overwrite_averages,
    }
    with contextlib.ExitStack() as undo:
        for each in training.callbacks(original, args, kwargs):
            if isinstance(each, keras.callbacks.SwapEMAWeights):
                for name, action in actions.items():
                    act = functools.partial(_act, each, action)
                    replacements.swap(undo, each, name, act)
        return original(*args, **kwargs)


def _act(callback: keras.callbacks.Callback, action: Callable) -> None:
    # Asking for its model brings the variables up to date on JAX.
    if callback.model is not None:
        action()
