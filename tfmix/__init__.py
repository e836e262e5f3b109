"""16-bit training for Keras 3 that reports its own failures."""

from tfmix import cli as _cli

with _cli.startup_log_held_back(only_of="python -m tfmix"):
    from tfmix._keras import version

version.require_supported()
version.require_private_names()

from tfmix import callbacks as callbacks
from tfmix._errors import LossScaleError as LossScaleError
from tfmix.conversion.convert import apply_policy as apply_policy
from tfmix.conversion.convert import convert_model as convert_model
from tfmix.conversion.convert import prepare as prepare
from tfmix.conversion.summary import summary as summary
from tfmix.devices import devices as devices
from tfmix.doctor.check import check as check
from tfmix.doctor.environment import environment as environment
from tfmix.float32_head import float32_output as float32_output
from tfmix.hardware.advise import advise as advise
from tfmix.hardware.compile_for import compile_for as compile_for
from tfmix.hardware.targets import targets as targets
from tfmix.in_force.global_policy.current_policy import (
    global_policy as global_policy,
)
from tfmix.in_force.global_policy.current_policy import (
    policy_scope as policy_scope,
)
from tfmix.in_force.global_policy.current_policy import (
    set_global_policy as set_global_policy,
)
from tfmix.policy.layer_rules import (
    default_float32_layers as default_float32_layers,
)
from tfmix.policy.op_rules import default_float32_ops as default_float32_ops
from tfmix.policy.policy import Policy as Policy
from tfmix.scaling.guard import guard as guard
from tfmix.scaling.optimizer import LossScaleOptimizer as LossScaleOptimizer
from tfmix.scaling.rules import DynamicLossScale as DynamicLossScale
from tfmix.scaling.rules import FixedLossScale as FixedLossScale
from tfmix.scaling.rules import LossScale as LossScale
from tfmix.scaling.rules import LossScaleState as LossScaleState
from tfmix.scaling.rules import NoLossScale as NoLossScale
from tfmix.step.finite import all_finite as all_finite
from tfmix.variables.bfloat16_rounding import (
    BFloat16Optimizer as BFloat16Optimizer,
)
from tfmix.variables.float32_weights import export_float32 as export_float32
from tfmix.variables.float32_weights import load_float32 as load_float32
from tfmix.variables.low_memory import LowMemoryOptimizer as LowMemoryOptimizer
from tfmix.variables.master import (
    MasterWeightOptimizer as MasterWeightOptimizer,
)

__version__ = "0.2.0"


def __dir__() -> list[str]:
    return [*__all__]


__all__ = [
    "BFloat16Optimizer",
    "DynamicLossScale",
    "FixedLossScale",
    "LossScale",
    "LossScaleError",
    "LossScaleOptimizer",
    "LossScaleState",
    "LowMemoryOptimizer",
    "MasterWeightOptimizer",
    "NoLossScale",
    "Policy",
    "advise",
    "all_finite",
    "apply_policy",
    "callbacks",
    "check",
    "compile_for",
    "convert_model",
    "default_float32_layers",
    "default_float32_ops",
    "devices",
    "environment",
    "export_float32",
    "float32_output",
    "global_policy",
    "guard",
    "load_float32",
    "policy_scope",
    "prepare",
    "set_global_policy",
    "summary",
    "targets",
]
