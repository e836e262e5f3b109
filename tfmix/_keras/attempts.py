"""What a layer's failed call leaves behind, and how it is taken back."""

from typing import Any

import keras
from keras.src.backend.common import stateless_scope

from tfmix._keras import layers

State = tuple[Any, dict, list] | None


def state() -> State:
    """Notes the state that a call may assign to; eager state is not noted."""
    scope = stateless_scope.get_stateless_scope()
    if scope is None:
        return None
    return scope, dict(scope.state_mapping), list(scope.losses)


def restore(before: State, layer: keras.Layer) -> None:
    """Takes back what a failed call of a layer assigned and added."""
    if before is not None:
        scope, mapping, losses = before
        scope.state_mapping, scope.losses = mapping, losses
    for each in layers.flat_layers(layer):
        # Those of a call that failed would count twice.
        each._losses.clear()
        each._loss_ids.clear()
