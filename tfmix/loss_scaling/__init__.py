"""Loss scaling, and steps that are applied or skipped as a whole."""

from tfmix.loss_scaling.rules import LossScale, LossScaleState

__all__ = ["LossScale", "LossScaleState"]
