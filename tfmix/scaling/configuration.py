"""The settings of a LossScaleOptimizer as plain data, and back."""

from typing import Any

import keras

from tfmix.scaling import rules, settings


def to_config(optimizer: Any) -> dict[str, Any]:
    """Returns the constructor's arguments, in Keras's form if they fit it.

    Args:
        optimizer: A `LossScaleOptimizer`.

    Returns:
        A dict of plain data.
    """
    serialize = keras.saving.serialize_keras_object
    config = {
        "name": optimizer.name,
        "inner_optimizer": serialize(optimizer.inner_optimizer),
    }
    keras_form = {
        "initial_scale": optimizer.initial_scale,
        "dynamic_growth_steps": optimizer.dynamic_growth_steps,
    }
    if _says_all(optimizer.rule, **keras_form):
        config |= keras_form
    else:
        config["loss_scale"] = serialize(optimizer.rule)
    return config


def deserialized(config: dict[str, Any], custom_objects: Any) -> dict[str, Any]:
    """Returns a copy of a config with its objects made."""
    config = dict(config)
    for key in ("inner_optimizer", "loss_scale"):
        if isinstance(config.get(key), dict):
            config[key] = keras.saving.deserialize_keras_object(
                config[key], custom_objects=custom_objects
            )
    return config


def _says_all(
    rule: rules.LossScale, initial_scale: Any, dynamic_growth_steps: Any
) -> bool:
    # Keras has two settings; the rule may differ from the default in more.
    if type(rule) is not rules.DynamicLossScale:
        return False
    return rule == settings.loss_scale_rule(
        "dynamic", initial_scale, dynamic_growth_steps
    )
