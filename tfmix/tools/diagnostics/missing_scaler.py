"""Warns about float16 models whose loss is not scaled."""

import keras

from tfmix import _formats
from tfmix._keras import layers, optimizers, replacing


def warning(model: keras.Model) -> str:
    """Returns a warning for a float16 model whose loss is not scaled.

    It is empty for a model that is not compiled, has no float16 layers, has
    a policy of tfmix (which scales gradients inside it), or has an optimizer
    that scales the loss. Keras only scales the loss if the model's own policy
    is "mixed_float16", and not with `compile(auto_scale_loss=False)`.
    """
    optimizer = getattr(model, "optimizer", None)
    if (
        optimizer is None
        or isinstance(optimizer, optimizers.KerasScaler)
        or getattr(optimizer, "loss_scale_factor", None)
        or replacing.part(model, replacing.RULES) is not None
        or not layers.computes_in(model, "float16")
    ):
        return ""
    name = type(optimizer).__name__
    return (
        f"The model computes in float16 and {name} does not scale the loss: "
        f"gradients below {_formats.FLOAT16.smallest:.1g} become 0. Compile "
        f"with tfmix.LossScaleOptimizer({name}(...))."
    )
