"""Fast 16-bit training for Keras 3 that gives float32's results."""

import os as _os

from tfmix._keras import version

version.require_supported()
version.require_private_names()

from tfmix import callbacks as callbacks
from tfmix import hardware as hardware
from tfmix import optimizers as optimizers
from tfmix.autocast import record as _model
from tfmix.autocast import replaced as _replaced
from tfmix.autocast.float32_output import float32_output as float32_output
from tfmix.autocast.global_policy import global_policy as global_policy
from tfmix.autocast.global_policy import policy_scope as policy_scope
from tfmix.autocast.global_policy import (
    set_global_policy as set_global_policy,
)
from tfmix.conversion.convert import apply_policy as apply_policy
from tfmix.conversion.convert import convert_model as convert_model
from tfmix.conversion.convert import prepare as prepare
from tfmix.loss_scaling.errors import LossScaleError as LossScaleError
from tfmix.loss_scaling.optimizer import (
    LossScaleOptimizer as LossScaleOptimizer,
)
from tfmix.loss_scaling.rules import DynamicLossScale as DynamicLossScale
from tfmix.loss_scaling.rules import FixedLossScale as FixedLossScale
from tfmix.loss_scaling.rules import NoLossScale as NoLossScale
from tfmix.policy.policy import Policy as Policy
from tfmix.step.finite import all_finite as all_finite
from tfmix.step.guard import guard as guard
from tfmix.tools.diagnostics import skip_report as _skip_report
from tfmix.tools.diagnostics.check import check as check
from tfmix.tools.diagnostics.summary import summary as summary

_model.report_skips(_skip_report)
_replaced.begin()

__version__ = "0.2.0"

if _os.environ.get("TFMIX_POLICY"):
    # `tfmix run` sets it, or a launcher that owns the command line.
    from tfmix.tools.run import session as _session

    _session.begin()


def __dir__() -> list[str]:
    return [*__all__]


__all__ = [
    "DynamicLossScale",
    "FixedLossScale",
    "LossScaleError",
    "LossScaleOptimizer",
    "NoLossScale",
    "Policy",
    "all_finite",
    "apply_policy",
    "callbacks",
    "check",
    "convert_model",
    "float32_output",
    "global_policy",
    "guard",
    "hardware",
    "optimizers",
    "policy_scope",
    "prepare",
    "set_global_policy",
    "summary",
]
