"""Weights, judged by what the cast to 16 bit leaves of them."""

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from tfmix import _formats
from tfmix.conversion import trial_policies
from tfmix.doctor import gaps, probe, verdicts


def findings(
    found: Sequence[probe.Target],
    planned: trial_policies.Plan,
    limits: _formats.Format,
) -> list[verdicts.Finding]:
    """Judges the weights of every layer that reads them in 16 bit.

    A weight that no row of the batch uses, such as a row of an embedding, is
    judged, too.

    Args:
        found: The watched layers.
        planned: The 16-bit plan.
        limits: The 16-bit format.

    Returns:
        A finding for each layer with such weights.
    """
    result = []
    for order, target in enumerate(found):
        values = _cast_weights(target, planned)
        if not values:
            continue
        near = [ops.cast(value, limits.name) for value in values]
        gap = gaps.gap(near, values, limits)
        verdict = verdicts.of_output(gap, limits)
        result.append(
            verdicts.Finding(target.name, verdicts.WEIGHTS, verdict, gap, order)
        )
    return result


def _cast_weights(
    target: probe.Target, planned: trial_policies.Plan
) -> list[Any]:
    if not isinstance(target.operation, keras.Layer):
        return []
    layers = target.layers if target.whole else [target.operation]
    return [
        variable.value
        for layer in layers
        if trial_policies.dtype(planned, layer) in _formats.SIXTEEN_BIT
        and _casts(layer)
        for variable in layer._trainable_variables
    ]


def _casts(layer: Any) -> bool:
    """Says whether a layer uses its weights in its compute dtype."""
    # Layers without autocast, such as the normalisations, cast by themselves
    # where they need float32; an embedding casts what it looked up.
    return bool(layer.autocast) or isinstance(layer, keras.layers.Embedding)
