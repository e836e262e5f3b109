"""Two runs of a whole model: in 16 bit for its dtypes, in float32 for truth."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from keras import ops

from tfmix import _formats
from tfmix._keras import layers
from tfmix.conversion import planned_policies
from tfmix.doctor import batch as batches
from tfmix.doctor import probe, pullback

Key = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Signature:
    """What the float tensors of one call were in the 16-bit run."""

    # Dtypes, and whether the values fit into 16 bits whatever the dtype: a
    # 16-bit layer made them.
    arguments: tuple[str, ...]
    rounded: tuple[bool, ...]
    # Dtypes, shapes, and whether these are the model's own outputs.
    outputs: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    is_output: bool = False


@dataclasses.dataclass(frozen=True)
class SixteenBitRun:
    """The 16-bit run: every call's `Signature`, and what came out."""

    signatures: dict[Key, Signature]
    output_dtypes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Truth:
    """Gradients of the float32 run: of each call's outputs, of the weights."""

    outputs: dict[Key, list[Any]]
    weights: list[Any]


def sixteen_bit(
    batch: batches.Batch,
    found: Sequence[probe.Target],
    planned: planned_policies.Plan,
    fmt: str,
) -> SixteenBitRun:
    """Runs the model forward in 16 bit and notes the dtypes."""
    signatures: dict[Key, Signature] = {}
    made: dict[int, Key] = {}
    # Kept until the end, so that an `id` stands for one tensor only.
    alive = []

    def on_call(call: probe.Call) -> Any:
        outputs = call.proceed()
        leaves = probe.floats(outputs)
        if all(map(layers.is_number, [*leaves, *call.tensors])):
            signatures[call.key] = Signature(
                arguments=tuple(map(probe.dtype, call.tensors)),
                rounded=tuple(_fits(leaf, fmt) for leaf in call.tensors),
                outputs=tuple(map(probe.dtype, leaves)),
                shapes=tuple(tuple(leaf.shape) for leaf in leaves),
            )
            for leaf in leaves:
                # What a layer hands on from one inside it is the inner one's.
                made.setdefault(id(leaf), call.key)
            alive.append(leaves)
        return outputs

    with layers.policies(planned), probe.watched(found, on_call):
        outputs, _ = batch.run(batch.weights())
    leaves = probe.floats(outputs)
    for key in {made[id(leaf)] for leaf in leaves if id(leaf) in made}:
        signatures[key] = dataclasses.replace(signatures[key], is_output=True)
    return SixteenBitRun(signatures, tuple(map(probe.dtype, leaves)))


def truth(
    batch: batches.Batch,
    found: Sequence[probe.Target],
    planned: planned_policies.Plan,
    signatures: dict[Key, Signature],
) -> Truth:
    """Runs the model forward and back in float32."""
    # A zero is added to every output: its gradient is the output's.
    zeros = [
        ops.zeros(shape, "float32")
        for signature in signatures.values()
        for shape in signature.shapes
    ]

    def losses(inputs: list[Any]) -> list[Any]:
        nudges, weights = _dealt(inputs, signatures)

        def on_call(call: probe.Call) -> Any:
            outputs = call.proceed()
            leaves, nudge = probe.floats(outputs), nudges.get(call.key, [])
            if len(nudge) != len(leaves):
                return outputs
            moved = [
                leaf + ops.cast(zero, leaf.dtype)
                for leaf, zero in zip(leaves, nudge, strict=True)
            ]
            return probe.replaced(outputs, moved)

        with probe.watched(found, on_call):
            return [batch.run(weights)[1]]

    with layers.policies(planned), layers.autocast("float32"):
        (loss,), back = pullback.pullback(losses, [*zeros, *batch.weights()])
        gradients = back([ops.ones_like(loss)])
    return Truth(*_dealt(gradients, signatures))


def _dealt(
    tensors: Sequence[Any], signatures: dict[Key, Signature]
) -> tuple[dict[Key, list[Any]], list[Any]]:
    """Deals a list out to calls, and returns what is left over."""
    rest = iter(tensors)
    by_call = {
        key: [next(rest) for _ in signature.shapes]
        for key, signature in signatures.items()
    }
    return by_call, list(rest)


def _fits(tensor: Any, fmt: str) -> bool:
    if probe.dtype(tensor) in _formats.SIXTEEN_BIT:
        return True
    tensor = ops.cast(tensor, "float32")
    same = ops.cast(ops.cast(tensor, fmt), "float32") == tensor
    return bool(ops.all(same | ops.isnan(tensor)))
