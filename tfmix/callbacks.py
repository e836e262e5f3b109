"""Callbacks that monitor loss scaling and 16-bit numbers during `fit`."""

from tfmix.tools.callbacks.loss_scale_monitor import LossScaleMonitor
from tfmix.tools.callbacks.numerics_monitor import NumericsMonitor

__all__ = ["LossScaleMonitor", "NumericsMonitor"]
