"""Callbacks that show what loss scaling and 16-bit numbers do in `fit`."""

from tfmix.callbacks.loss_scale_monitor import LossScaleMonitor
from tfmix.callbacks.numerics_monitor import NumericsMonitor

__all__ = ["LossScaleMonitor", "NumericsMonitor"]
