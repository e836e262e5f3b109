"""Estimates the memory of training, for each way to train a model."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import keras

from tfmix._keras import optimizers
from tfmix.optimizers import eight_bit, eight_bit_slots
from tfmix.tools.hardware import target as targets

_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
_ADAMS = 2  # the moments of a weight, for a model without an optimizer
_MASTERS = "tfmix.optimizers.MasterWeightOptimizer({})"
_LOW = "tfmix.optimizers.LowMemoryOptimizer(optimizer)"
_STOCHASTIC = "tfmix.optimizers.BFloat16Optimizer({})"


@dataclasses.dataclass(frozen=True)
class Memory:
    """The memory of training, in bytes.

    Attributes:
        weights: All variables of the model.
        masters: The float32 masters of 16-bit weights.
        slots: The optimizer state, Adam's two moments for example.
        gradients: All gradients at once. A compiler may free one before it
            computes the next.
        activations: The layers' outputs, and the gates and states of
            recurrent layers in all time steps, kept for the backward pass. A
            framework may keep more, such as a ReLU's input on JAX. A CPU
            without 16-bit arithmetic keeps them in float32.
    """

    weights: int
    masters: int
    slots: int
    gradients: int
    activations: int

    @property
    def total(self) -> int:
        """The sum of all kinds."""
        return sum(dataclasses.astuple(self))

    def by_title(self) -> dict[str, int]:
        """Returns the bytes by the titles of kinds in tables."""
        titles = {"slots": "optimizer state"}
        fields = dataclasses.asdict(self)
        return {titles.get(name, name): size for name, size in fields.items()}


# The ways to train are in the order of how much they change. A name begins with
# that of a policy, and the value is the optimizer to write.
_WAYS = {
    "float32": "",
    "mixed_float16": "",
    "mixed_bfloat16": "",
    "mixed_float16, 8-bit state": _LOW,
    "mixed_bfloat16, 8-bit state": _LOW,
    "float16": _MASTERS.format("optimizer"),
    "bfloat16": _MASTERS.format("optimizer"),
    "float16, 8-bit state": _MASTERS.format(_LOW),
    "bfloat16, 8-bit state": _MASTERS.format(_LOW),
    "bfloat16, no masters": _STOCHASTIC.format("optimizer"),
    "bfloat16, no masters, 8-bit state": _STOCHASTIC.format(_LOW),
}


def _policy(way: str) -> keras.DTypePolicy:
    return keras.DTypePolicy(way.partition(",")[0])


def by_way(model: Any, outputs: int) -> dict[str, Memory]:
    """Returns the bytes of each way to train a model.

    Args:
        model: A built model.
        outputs: The number of elements that a training step keeps of them.
    """
    trainable = _elements(model.trainable_variables)
    weights = trainable + _elements(model.non_trainable_variables)
    slots = _slots(model, trainable)
    slots_per_weight = round(slots / trainable) if trainable else 0
    eight_bits = slots_per_weight * sum(
        map(_eight_bit_bytes, model.trainable_variables)
    )
    memories = {}
    for way, optimizer in _WAYS.items():
        policy, has_eight_bits = _policy(way), "8-bit state" in way
        # Without optimizer state, 8-bit state makes no difference.
        if slots_per_weight or not has_eight_bits:
            memories[way] = Memory(
                weights * _BYTES[policy.variable_dtype],
                trainable * _BYTES["float32"] * ("Master" in optimizer),
                eight_bits if has_eight_bits else slots * _BYTES["float32"],
                trainable * _BYTES[policy.variable_dtype],
                outputs * _BYTES[policy.compute_dtype],
            )
    return memories


def of_target(
    memories: Mapping[str, Memory], target: targets.Target
) -> dict[str, Memory]:
    """Returns the ways to train whose products a target can multiply."""
    return {
        way: memory
        for way, memory in memories.items()
        if _policy(way).compute_dtype in target.rates
    }


def first_that_fits(
    memories: Mapping[str, Memory], target: targets.Target
) -> str:
    """Describes the first way to train that fits a target.

    It considers float32 and the 16-bit dtype of `"auto"` there.
    """
    has = f"{target.name} has {target.memory / 2**20:,.0f} MiB"
    auto = target.auto()
    if memories["float32"].total <= target.memory:
        return f"{has}. float32 fits; faster is {auto}, which is 'auto' there"
    for name, memory in memories.items():
        fits = memory.total <= target.memory
        if fits and f"mixed_{_policy(name).compute_dtype}" == auto:
            compiled = _WAYS[name] and f". Compile with {_WAYS[name]}"
            return f"{has}. The first that fits: {name}{compiled}"
    return f"{has}. None of these fits: use a smaller batch, or LoRA"


def _slots(model: Any, trainable: int) -> int:
    chain = list(optimizers.chain(getattr(model, "optimizer", None)))
    # The last optimizer of the chain is inside all wrappers.
    if not chain or not chain[-1].built:
        return _ADAMS * trainable
    return _elements(chain[-1].variables)


def _eight_bit_bytes(variable: keras.Variable) -> int:
    """Returns the bytes of one slot of a variable, by the default rules."""
    elements = math.prod(variable.shape)
    if eight_bit_slots.keeps_float32(variable):
        return elements * _BYTES["float32"]
    blocks = math.prod(eight_bit.blocks_shape(tuple(variable.shape)))
    return elements + blocks * _BYTES["float32"]


def _elements(variables: Iterable[keras.Variable]) -> int:
    return sum(
        math.prod(variable.shape)
        for variable in variables
        if keras.backend.is_float_dtype(variable.dtype)
        # 8-bit state counts as well. Its scales are few.
        or "int8" in variable.dtype
    )
