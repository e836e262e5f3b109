"""Mixed-precision training for Keras 3 that cannot go wrong in silence."""

from tfmix import _host

_host.require_supported_keras()

from tfmix import callbacks as callbacks
from tfmix import data as data
from tfmix import plotting as plotting
from tfmix._errors import LossScaleError as LossScaleError
from tfmix.convert import apply_policy as apply_policy
from tfmix.convert import convert_model as convert_model
from tfmix.convert import prepare as prepare
from tfmix.devices import devices as devices
from tfmix.numerics.advise import advise as advise
from tfmix.numerics.calibrate import (
    calibrate_loss_scale as calibrate_loss_scale,
)
from tfmix.numerics.check import check as check
from tfmix.output import float32_output as float32_output
from tfmix.policy.policy import Policy as Policy
from tfmix.policy.state import global_policy as global_policy
from tfmix.policy.state import policy_scope as policy_scope
from tfmix.policy.state import set_global_policy as set_global_policy
from tfmix.scaling.bfloat16 import BFloat16Optimizer as BFloat16Optimizer
from tfmix.scaling.export import export_float32 as export_float32
from tfmix.scaling.export import load_float32 as load_float32
from tfmix.scaling.finite import all_finite as all_finite
from tfmix.scaling.guard import guard as guard
from tfmix.scaling.master import MasterWeightOptimizer as MasterWeightOptimizer
from tfmix.scaling.optimizer import LossScaleOptimizer as LossScaleOptimizer
from tfmix.scaling.strategy import DynamicLossScale as DynamicLossScale
from tfmix.scaling.strategy import FixedLossScale as FixedLossScale
from tfmix.scaling.strategy import LossScale as LossScale
from tfmix.scaling.strategy import LossScaleState as LossScaleState
from tfmix.scaling.strategy import NoLossScale as NoLossScale

__version__ = "0.1.0"

__all__ = [
    "BFloat16Optimizer",
    "DynamicLossScale",
    "FixedLossScale",
    "LossScale",
    "LossScaleError",
    "LossScaleOptimizer",
    "LossScaleState",
    "MasterWeightOptimizer",
    "NoLossScale",
    "Policy",
    "advise",
    "all_finite",
    "apply_policy",
    "calibrate_loss_scale",
    "callbacks",
    "check",
    "convert_model",
    "data",
    "devices",
    "export_float32",
    "float32_output",
    "global_policy",
    "guard",
    "load_float32",
    "plotting",
    "policy_scope",
    "prepare",
    "set_global_policy",
]
