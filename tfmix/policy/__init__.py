"""Which dtype is used where: policies, their rules, and how Keras gets them."""

import importlib
import types
import warnings

# The names two modules had before, and what is to be used instead.
_MOVED = {
    "rules": ("layer_rules", "default_float32_layers"),
    "ops": ("op_rules", "default_float32_ops"),
}


def __getattr__(name: str) -> types.ModuleType:
    if name not in _MOVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, function = _MOVED[name]
    warnings.warn(
        f"tfmix.policy.{name} is deprecated. Use tfmix.{function} instead.",
        DeprecationWarning,
        stacklevel=2,
    )
    return importlib.import_module(f"tfmix.policy.{module}")
