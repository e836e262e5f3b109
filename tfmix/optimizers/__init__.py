"""Optimizers for 16-bit variables and for 8-bit optimizer state."""

from tfmix.optimizers.bfloat16_optimizer import BFloat16Optimizer
from tfmix.optimizers.float32_weights import export_float32, load_float32
from tfmix.optimizers.low_memory import LowMemoryOptimizer
from tfmix.optimizers.master_weights import MasterWeightOptimizer

__all__ = [
    "BFloat16Optimizer",
    "LowMemoryOptimizer",
    "MasterWeightOptimizer",
    "export_float32",
    "load_float32",
]
