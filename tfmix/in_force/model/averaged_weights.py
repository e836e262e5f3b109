"""`SwapEMAWeights` swaps the float32 weights behind 16-bit variables."""

import contextlib
from collections.abc import Callable
from typing import Any

import keras

from tfmix._keras import averages, training
from tfmix.variables import sixteen_bit_optimizer


def swapped(
    model: keras.Model, original: Callable, *args: Any, **kwargs: Any
) -> Any:
    """Calls `fit`, `evaluate` or `predict`, whose callbacks may swap."""
    owner = sixteen_bit_optimizer.owner(getattr(model, "optimizer", None))
    if owner is None or not averages.are_kept(owner.inner_optimizer):
        return original(*args, **kwargs)
    swaps = owner.swap_averages, owner.overwrite_averages
    with contextlib.ExitStack() as undo:
        for callback in training.callbacks(original, args, kwargs):
            if isinstance(callback, keras.callbacks.SwapEMAWeights):
                averages.swap_by(undo, callback, *swaps)
        return original(*args, **kwargs)
