"""float16 models that are trained without loss scaling."""

from typing import Any

import keras

from tfmix import _formats
from tfmix.policy.in_force import suited_optimizer


def warning(model: Any) -> str:
    """Says what to write for a float16 model whose loss is not scaled.

    Keras scales the loss by itself only where the model as a whole has the
    policy "mixed_float16", and `compile(auto_scale_loss=False)` stops that.

    Args:
        model: A Keras model.

    Returns:
        A sentence; empty for a model that is not compiled, has no layers in
        float16, or has an optimizer that scales the loss.
    """
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or not suited_optimizer.computes_in(model, "float16"):
        return ""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return ""
    if getattr(optimizer, "loss_scale_factor", None):
        return ""
    name = type(optimizer).__name__
    smallest = _formats.FLOAT16.smallest
    return (
        f"The model computes in float16 and {name} does not scale the loss: "
        f"gradients below {smallest:.1g} become 0. Compile with "
        f"tfmix.LossScaleOptimizer({name}(...))."
    )
