"""Outputs of a model that are left in 16 bit."""

from typing import Any

import keras
import numpy as np
from keras import ops

from tfmix import _formats
from tfmix.doctor import gaps, verdicts, whole_model

# Half of the smallest normal value and all below: the digits are going.
_SHARE = 0.1
_SUM_TOLERANCE = 1e-3
# In 16 bit, where bfloat16 rounds by up to 0.004.
_ROUNDED_TOLERANCE = 0.01


def probabilities(operation: Any, outputs: list[Any]) -> bool:
    """Says whether what a layer returns are probabilities.

    Args:
        operation: The layer.
        outputs: Its outputs in float32. A softmax written by hand is known by
            its values: between 0 and 1, with sums of 1.
    """
    activation = getattr(operation, "activation", None)
    if activation in (keras.activations.softmax, keras.activations.sigmoid):
        return True
    return any(_sums_to_one(leaf) for leaf in outputs)


def finding(
    layer: str,
    order: int,
    found: gaps.Gap,
    signature: whole_model.Signature,
    is_probability: bool,
) -> verdicts.Finding | None:
    """Judges an output of the model that is left in 16 bit.

    Rounded probabilities have lost the logits behind them: where a class
    has 0, the loss has no gradient that could raise it.
    """
    dtypes = [
        name for name in signature.outputs if name in _formats.SIXTEEN_BIT
    ]
    if not (signature.is_output and dtypes and is_probability):
        return None
    low = found.flushed + found.subnormal > _SHARE
    return verdicts.Finding(
        layer,
        verdicts.FORWARD,
        verdicts.UNDERFLOW if low else verdicts.INACCURATE,
        found,
        order,
        latent=True,
        note=f"the model's probabilities are left in {dtypes[0]}",
    )


def looks_like_probabilities(output: Any) -> Any:
    """Says the same of a tensor in a traced step, by its values alone.

    Args:
        output: A float tensor, in 16 bit perhaps.

    Returns:
        A float32 scalar: 1 if its rows lie between 0 and 1 and sum to 1.
    """
    if len(output.shape) < 2 or output.shape[-1] in (None, 1):
        return ops.zeros(())
    values = ops.cast(output, "float32")
    inside = ops.all((values >= 0) & (values <= 1))
    away = ops.max(ops.abs(ops.sum(values, -1) - 1.0))
    return ops.cast(inside & (away <= _ROUNDED_TOLERANCE), "float32")


def _sums_to_one(leaf: Any) -> bool:
    if len(leaf.shape) < 2 or leaf.shape[-1] < 2:
        return False
    values = np.asarray(ops.convert_to_numpy(leaf))
    inside = np.all((values >= 0) & (values <= 1))
    sums = values.sum(-1, dtype=np.float64)
    return bool(inside and np.allclose(sums, 1.0, atol=_SUM_TOLERANCE))
