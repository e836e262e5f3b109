"""Which call of a layer is running, and whether on numbers or on shapes.

Checked on Keras 3.12.4 and 3.15.1.
"""

import importlib
from typing import Any

import keras


def on_shapes_only() -> bool:
    """Says whether Keras infers shapes, on stand-ins that remember nothing."""
    return bool(_common("symbolic_scope").in_symbolic_scope())


def is_outermost(layer: keras.Layer) -> bool:
    """Says whether a layer was called by no other, and with real tensors."""
    if on_shapes_only():
        return False
    state = _common("global_state")
    context = state.get_global_attribute("current_call_ctx")
    return context is not None and context.entry_layer is layer


def _common(name: str) -> Any:
    return importlib.import_module(f"keras.src.backend.common.{name}")
