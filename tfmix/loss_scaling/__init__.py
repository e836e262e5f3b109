"""The loss scale, and steps applied or skipped as a whole."""

from tfmix.loss_scaling.rules import LossScale, LossScaleState

__all__ = ["LossScale", "LossScaleState"]
