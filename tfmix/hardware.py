"""Devices and their abilities, and the cost of a training step on them."""

from tfmix.tools.hardware.advice import advise
from tfmix.tools.hardware.compiling import compile_for
from tfmix.tools.hardware.device_table import devices
from tfmix.tools.hardware.target import targets

__all__ = ["advise", "compile_for", "devices", "targets"]
