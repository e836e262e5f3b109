"""What training holds in memory, by kind, for each way to train a model."""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import keras

from tfmix._keras import optimizers
from tfmix.hardware import target as targets
from tfmix.optimizers import eight_bit, eight_bit_slots, sixteen_bit_optimizer

_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
_ADAMS = 2  # moments of a weight, where the model has no optimizer yet
_MASTERS = "tfmix.optimizers.MasterWeightOptimizer(optimizer{})"
_LOW = "tfmix.optimizers.LowMemoryOptimizer(optimizer)"
_STOCHASTIC = "tfmix.optimizers.BFloat16Optimizer(optimizer{})"
_INT8 = ', slot_dtype="int8"'


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes that training holds in one way.

    Attributes:
        weights: Of all variables of the model.
        masters: Of the float32 masters behind 16-bit weights.
        slots: Of the optimizer state, Adam's two moments for example.
        gradients: Of all gradients at once. A compiler may free one before the
            next is made.
        activations: Of what layers return, kept for the backward pass. A
            framework may keep more, JAX a ReLU's input for instance, and a
            CPU without 16-bit arithmetic keeps them in float32.
    """

    weights: int
    masters: int
    slots: int
    gradients: int
    activations: int

    @property
    def total(self) -> int:
        """All of them together."""
        return sum(dataclasses.astuple(self))

    def by_title(self) -> dict[str, int]:
        """Returns the bytes by what tables call each kind."""
        titles = {"slots": "optimizer state"}
        fields = dataclasses.asdict(self)
        return {titles.get(name, name): size for name, size in fields.items()}


@dataclasses.dataclass(frozen=True)
class _Way:
    """A way to train: the dtypes, and what becomes of the optimizer."""

    weights: str
    activations: str
    optimizer: str = ""

    @property
    def has_masters(self) -> bool:
        return self.optimizer.startswith(_MASTERS.partition("(")[0])

    @property
    def is_coded(self) -> bool:
        return self.optimizer == _LOW or _INT8 in self.optimizer


# From the one that changes least to the one that changes most.
_WAYS = {
    "float32": _Way("float32", "float32"),
    "mixed_float16": _Way("float32", "float16"),
    "mixed_bfloat16": _Way("float32", "bfloat16"),
    "mixed_float16, 8-bit state": _Way("float32", "float16", _LOW),
    "mixed_bfloat16, 8-bit state": _Way("float32", "bfloat16", _LOW),
    "float16": _Way("float16", "float16", _MASTERS.format("")),
    "bfloat16": _Way("bfloat16", "bfloat16", _MASTERS.format("")),
    "float16, 8-bit state": _Way("float16", "float16", _MASTERS.format(_INT8)),
    "bfloat16, 8-bit state": _Way(
        "bfloat16", "bfloat16", _MASTERS.format(_INT8)
    ),
    "bfloat16, no masters": _Way(
        "bfloat16", "bfloat16", _STOCHASTIC.format("")
    ),
    "bfloat16, no masters, 8-bit state": _Way(
        "bfloat16", "bfloat16", _STOCHASTIC.format(_INT8)
    ),
}


def by_way(model: Any, outputs: int) -> dict[str, Memory]:
    """Returns the bytes of each way to train a model.

    Args:
        model: A built model.
        outputs: How many elements its layers return in a training step.
    """
    trainable = _elements(model.trainable_variables)
    weights = trainable + _elements(model.non_trainable_variables)
    slots = _slots(model, trainable)
    slots_per_weight = round(slots / trainable) if trainable else 0
    coded = slots_per_weight * sum(map(_coded_bytes, model.trainable_variables))
    return {
        name: Memory(
            weights * _BYTES[way.weights],
            trainable * _BYTES["float32"] * way.has_masters,
            coded if way.is_coded else slots * _BYTES["float32"],
            trainable * _BYTES[way.weights],
            outputs * _BYTES[way.activations],
        )
        for name, way in _WAYS.items()
        # Without optimizer state there is none to code.
        if slots_per_weight or not way.is_coded
    }


def held(model: Any, temporaries: int) -> Memory:
    """Returns the bytes that a compiled model's training holds, by kind.

    Args:
        model: A compiled model whose optimizer is built.
        temporaries: What a step takes besides its arguments: its gradients; the
            rest counts as activations.
    """
    *wrappers, inner = optimizers.chain(model.optimizer)
    masters = [
        variable
        for wrapper in wrappers
        if isinstance(wrapper, sixteen_bit_optimizer.SixteenBitOptimizer)
        for variable in optimizers.own_variables(wrapper)
    ]
    slots = {
        id(variable): variable
        for worker in (inner, *optimizers.workers(inner))
        for variable in worker.variables
    }
    gradients = _bytes(model.trainable_variables)
    return Memory(
        _bytes(model.variables),
        _bytes(masters),
        _bytes(slots.values()),
        gradients,
        max(temporaries - gradients, 0),
    )


def first_that_fits(
    memories: Mapping[str, Memory],
    target: targets.Target,
    is_small: bool = False,
) -> str:
    """Says which way in the 16-bit dtype of a target is the first that fits.

    That dtype is what `"auto"` takes there; a model that `is_small` gains no
    time by it.
    """
    has = f"{target.name} has {target.memory / 2**20:,.0f} MiB"
    auto = target.auto()
    fits = memories["float32"].total <= target.memory
    if fits and is_small:
        return (
            f"{has}. float32 fits, and 16 bit would be no faster: the products "
            "take less time than their start"
        )
    if fits:
        return f"{has}. float32 fits; faster is {auto}, which is 'auto' there"
    for name, memory in memories.items():
        way = _WAYS[name]
        fits = memory.total <= target.memory
        if fits and f"mixed_{way.activations}" == auto:
            compiled = way.optimizer and f". Compile with {way.optimizer}"
            return f"{has}. The first that fits: {name}{compiled}"
    return f"{has}. None of these fits: take a smaller batch, or LoRA"


def _slots(model: Any, trainable: int) -> int:
    chain = list(optimizers.chain(getattr(model, "optimizer", None)))
    # The optimizer inside all wrappers.
    if not chain or not chain[-1].built:
        return _ADAMS * trainable
    return _elements(chain[-1].variables)


def _coded_bytes(variable: keras.Variable) -> int:
    """Returns the bytes of one slot of a variable, in 8 bits by the rules."""
    elements = math.prod(variable.shape)
    if eight_bit_slots.keeps_float32(eight_bit_slots.INT8, variable):
        return elements * _BYTES["float32"]
    blocks = eight_bit.blocks(tuple(variable.shape))
    return elements + blocks * _BYTES["float32"]


def _bytes(variables: Iterable[keras.Variable]) -> int:
    """Returns the bytes of all but scalars, which are nobody's kind."""
    return sum(
        math.prod(variable.shape) * _size(variable.dtype)
        for variable in variables
        if len(variable.shape)
    )


def _size(dtype: str) -> int:
    bits = re.search(r"\d+", dtype)
    return int(bits.group()) // 8 if bits else 1


def _elements(variables: Iterable[keras.Variable]) -> int:
    return sum(
        math.prod(variable.shape)
        for variable in variables
        if keras.backend.is_float_dtype(variable.dtype)
        # What is kept in 8 bits, whose scales are few.
        or variable.dtype == "uint8"
    )
