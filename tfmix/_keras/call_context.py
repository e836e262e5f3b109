"""Which layer the user called, of those whose calls are running.

Checked on Keras 3.12.4 and 3.15.1.
"""

import importlib

import keras


def is_outermost(layer: keras.Layer) -> bool:
    """Says whether a layer was called by no other, and with real tensors."""
    common = "keras.src.backend.common"
    scopes = importlib.import_module(f"{common}.symbolic_scope")
    if scopes.in_symbolic_scope():
        return False
    state = importlib.import_module(f"{common}.global_state")
    context = state.get_global_attribute("current_call_ctx")
    return context is not None and context.entry_layer is layer
