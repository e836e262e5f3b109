"""How much of a model 16-bit hardware can speed up, and what it weighs."""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

import keras

from tfmix import _arguments, _formats, _tables
from tfmix._keras import optimizers
from tfmix.hardware import products

# Tensor Cores work on multiples of 8 in 16 bit (NVIDIA's mixed-precision
# guide), the MXU of a TPU on tiles of 128.
GPU_MULTIPLE, TPU_MULTIPLE = 8, 128
_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
# Policies, and the dtypes of weights and activations under each.
_POLICIES = {
    "float32": ("float32", "float32"),
    "mixed_float16": ("float32", "float16"),
    "mixed_bfloat16": ("float32", "bfloat16"),
    "float16": ("float16", "float16"),
    "bfloat16": ("bfloat16", "bfloat16"),
}


@dataclasses.dataclass(frozen=True)
class LayerProducts:
    """One layer with matrix products."""

    layer: str  # the layer's path
    dtype: str  # the dtype it computes in
    shapes: tuple[tuple[int, int, int], ...]  # of `(m, k) x (k, n)`
    # Whether k and n of each are multiples of 8, which a GPU's Tensor Cores
    # need, and of 128, a TPU's tile.
    aligned: bool
    aligned_tpu: bool
    flops: int  # of a forward pass
    padding: str  # what to round up, as text; empty if nothing helps


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes that training holds under one policy."""

    weights: int  # of all variables of the model
    # Of the optimizer's variables, in float32, and of the float32 masters that
    # tfmix keeps behind 16-bit weights.
    slots: int
    # Of what layers return, kept for the backward pass. A framework may keep
    # more, JAX a ReLU's input for instance, and a CPU without 16-bit arithmetic
    # keeps them in float32.
    activations: int

    @property
    def total(self) -> int:
        """All three together."""
        return self.weights + self.slots + self.activations


@dataclasses.dataclass(frozen=True)
class Advice(_tables.Printed):
    """What `advise` found; prints as a table.

    Attributes:
        rows: One `LayerProducts` per layer with products, the costliest first.
        share_16bit: Share of the operations that run in 16 bit, 0 to 1.
        memory: Policy name to `Memory`.
        batch_size: The batch size it holds for.
    """

    rows: tuple[LayerProducts, ...]
    share_16bit: float
    memory: Mapping[str, Memory]
    batch_size: int

    def tables(self) -> list[_tables.Table]:
        """Returns the tables that are printed."""
        heads = ("layer", "dtype", "(m, k, n)", "GPU", "TPU", "GFLOP", "pad")
        rows = [
            (
                row.layer,
                row.dtype,
                " ".join(map(str, row.shapes)),
                "yes" if row.aligned else "no",
                "yes" if row.aligned_tpu else "no",
                f"{row.flops / 1e9:.3g}",
                row.padding,
            )
            for row in self.rows
        ]
        title = f"{self.share_16bit:.0%} of the work in 16 bit, "
        title += f"batch of {self.batch_size}"
        sizes = []
        for name, one in self.memory.items():
            known = (one.weights, one.slots, one.activations, one.total)
            sizes.append((name, *(f"{size / 2**20:.2f}" for size in known)))
        memory = ("MiB", "weights", "slots", "activations", "together")
        return [_tables.Table(heads, rows, title), _tables.Table(memory, sizes)]

    def to_json(self) -> str:
        """Returns the advice as JSON."""
        return json.dumps(dataclasses.asdict(self), indent=2)


def advise(model: keras.Model, batch_size: int) -> Advice:
    """Says where a model's shapes keep 16-bit hardware from being fast.

    Nothing is computed: the model runs on shapes alone.

    Args:
        model: A built `keras.Model`.
        batch_size: Integer, rows of a training batch.

    Returns:
        An `Advice`: `rows`, `share_16bit` and `memory`.

    Raises:
        TypeError: If `model` is no Keras model, or `batch_size` no integer.
        ValueError: If `batch_size` is below 1, or the model's input shapes
            are not known.

    Example:
        >>> layers = [keras.Input((64,)), keras.layers.Dense(10)]
        >>> advise(keras.Sequential(layers), 32).rows[0].padding
        'n 10 -> 16'
    """
    if not isinstance(model, keras.Model):
        raise TypeError(
            "`model` must be a keras.Model. "
            f"Received: model={model!r} of type {type(model).__name__}."
        )
    size = _arguments.count("batch_size", batch_size, example=32)
    found = products.uses(model, size)
    rows = [_row(use.layer, use.products) for use in found if use.products]
    rows.sort(key=lambda row: -row.flops)
    work = sum(row.flops for row in rows)
    fast = sum(row.flops for row in rows if row.dtype in _formats.SIXTEEN_BIT)
    share = fast / work if work else 0.0
    return Advice(tuple(rows), share, _memory(model, found), size)


def _row(layer: Any, found: tuple[products.Product, ...]) -> LayerProducts:
    gpu, tpu = (
        all(one.k % size == one.n % size == 0 for one in found)
        for size in (GPU_MULTIPLE, TPU_MULTIPLE)
    )
    return LayerProducts(
        layer.path or layer.name,
        str(layer.compute_dtype),
        tuple((one.m, one.k, one.n) for one in found),
        gpu,
        tpu,
        sum(one.flops for one in found),
        _padding(found[0]),
    )


def _padding(product: products.Product) -> str:
    hints = []
    for name, size in (("k", product.k), ("n", product.n)):
        padded = -(-size // GPU_MULTIPLE) * GPU_MULTIPLE
        small = size < GPU_MULTIPLE * 2
        # Padding that adds more to the work gives away what it wins.
        if padded != size and (small or padded / size <= 1.25):
            hints.append(f"{name} {size} -> {padded}")
    return ", ".join(hints)


def _memory(model: Any, found: list[products.Use]) -> dict[str, Memory]:
    trainable = _elements(model.trainable_variables)
    weights = trainable + _elements(model.non_trainable_variables)
    slots = 2 * trainable  # Adam's, where the model has no optimizer yet
    chain = list(optimizers.chain(getattr(model, "optimizer", None)))
    # The optimizer inside all wrappers.
    if chain and chain[-1].built:
        slots = _elements(chain[-1].variables)
    outputs = sum(use.outputs for use in found if not use.has_parts)
    return {
        name: Memory(
            weights * _BYTES[variables],
            # A master in float32 stands behind each 16-bit weight.
            (slots + trainable * (variables != "float32")) * _BYTES["float32"],
            outputs * _BYTES[activations],
        )
        for name, (variables, activations) in _POLICIES.items()
    }


def _elements(variables: list[keras.Variable]) -> int:
    return sum(
        math.prod(variable.shape)
        for variable in variables
        if keras.backend.is_float_dtype(variable.dtype)
    )
