"""Devices and their abilities, and the cost of a training step on them."""

from tfmix.hardware.advice import advise
from tfmix.hardware.compiling import compile_for
from tfmix.hardware.target import targets
from tfmix.policy.devices import devices

__all__ = ["advise", "compile_for", "devices", "targets"]
