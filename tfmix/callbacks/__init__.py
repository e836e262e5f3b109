"""Callbacks that show what loss scaling and 16-bit numbers do in `fit`."""

from tfmix.callbacks.loss_scale_monitor import LossScaleMonitor

__all__ = ["LossScaleMonitor"]
