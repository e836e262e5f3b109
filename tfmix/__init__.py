"""Mixed-precision training for Keras 3 that cannot go wrong in silence."""

from tfmix import _host

_host.require_supported_keras()

from tfmix._errors import LossScaleError as LossScaleError

__version__ = "0.1.0"

__all__ = [
    "LossScaleError",
]
