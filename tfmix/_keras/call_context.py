"""Which call of a layer is running, and whether on numbers or on shapes."""

import keras
from keras.src.backend.common import global_state, symbolic_scope


def on_shapes_only() -> bool:
    """Says whether Keras infers shapes, on stand-ins that remember nothing."""
    return bool(symbolic_scope.in_symbolic_scope())


def is_outermost(layer: keras.Layer) -> bool:
    """Says whether a layer was called by no other, and with real tensors."""
    if on_shapes_only():
        return False
    context = global_state.get_global_attribute("current_call_ctx")
    return context is not None and context.entry_layer is layer
