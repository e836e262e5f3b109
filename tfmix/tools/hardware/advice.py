"""`advise` estimates the speed and memory of a model on 16-bit hardware."""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import keras
from keras import tree

from tfmix import _arguments, _formats, _tables
from tfmix._keras import graphs
from tfmix._keras import layers as host
from tfmix.autocast import record as mixed_model
from tfmix.float8 import chosen_layers
from tfmix.policy import policy as policies
from tfmix.tools.hardware import model_batches, training_memory
from tfmix.tools.hardware import target as targets

Shape = tuple[int, ...]
Shapes = list[Shape]

# Tensor Cores work on multiples of 8 in 16 bit (NVIDIA's mixed-precision
# guide), the MXU of a TPU on tiles of 128.
GPU_MULTIPLE, TPU_MULTIPLE = 8, 128

# The table shows so many layers, the costliest ones. `rows` and JSON have all.
_SHOWN = 10


@dataclasses.dataclass(frozen=True)
class Product:
    """A matrix product `(m, k) x (k, n)`, `count` times in a forward pass."""

    m: int
    k: int
    n: int
    count: int = 1

    @property
    def flops(self) -> int:
        """The multiplications and additions in a forward pass."""
        return 2 * self.m * self.k * self.n * self.count


@dataclasses.dataclass(frozen=True)
class Use:
    """One call of a layer: its products, and what it keeps for backward."""

    layer: keras.Layer
    products: tuple[Product, ...]
    kept: int  # the number of elements, without those of layers that it calls


@dataclasses.dataclass(frozen=True)
class LayerProducts:
    """One layer with matrix products.

    Attributes:
        layer: The layer's path.
        dtype: The dtype it computes in.
        shapes: `(m, k, n)` of each product `(m, k) x (k, n)`.
        aligned: Whether k and n of each are multiples of 8, which a GPU's
            Tensor Cores need.
        aligned_tpu: Whether they are multiples of 128, a TPU's tile.
        flops: Multiplications and additions of a forward pass.
        padding: The sizes to round up, as text; `""` if that does not help.
        float8: Under `"mixed_float8"`, `"yes"` or the reason why the layer
            does not multiply in float8.
    """

    layer: str
    dtype: str
    shapes: tuple[tuple[int, int, int], ...]
    aligned: bool
    aligned_tpu: bool
    flops: int
    padding: str
    float8: str = ""


@dataclasses.dataclass(frozen=True)
class Advice(_tables.Printed):
    """The result of `advise`; prints as a table.

    Attributes:
        rows: One `LayerProducts` per layer with products, the costliest first.
        share_16bit: Share of the operations that run in 16 bit, 0 to 1.
        memory: Dict of ways to train, such as `"bfloat16, 8-bit state"`, to
            their `Memory` in bytes.
        batch_size: The batch size of these numbers.
        fitting: A sentence on the first way that fits the target, in the
            16-bit dtype of `"auto"` there; `""` without a target.
        float8: Sentences on which layers `"mixed_float8"` covers, and why not
            others; empty under other policies.
    """

    rows: tuple[LayerProducts, ...]
    share_16bit: float
    memory: Mapping[str, training_memory.Memory]
    batch_size: int
    fitting: str = ""
    float8: tuple[str, ...] = ()

    def tables(self) -> list[_tables.Table]:
        """Returns the tables to print."""
        heads = ("layer", "dtype", "(m, k, n)", "GPU", "TPU", "GFLOP", "pad")
        rows = [
            (
                row.layer,
                "float8" if row.float8 == "yes" else row.dtype,
                " ".join(map(str, row.shapes)),
                "yes" if row.aligned else "no",
                "yes" if row.aligned_tpu else "no",
                f"{row.flops / 1e9:.3g}",
                row.padding,
            )
            for row in self.rows[:_SHOWN]
        ]
        title = (
            f"{self.share_16bit:.0%} of the work in 16 bit"
            if self.share_16bit
            else "a model in float32"
        )
        title += f", batch of {self.batch_size}"
        sizes = []
        for name, memory in self.memory.items():
            sums = (*memory.by_title().values(), memory.total)
            sizes.append((name, *(f"{size / 2**20:.2f}" for size in sums)))
        # Short titles keep the table within the 80 columns of a terminal.
        kinds = [
            title.removeprefix("optimizer ")
            for title in self.memory["float32"].by_title()
        ]
        memory_table = _tables.Table(
            ("MiB", *kinds, "together"),
            sizes,
            notes=[self.fitting] if self.fitting else (),
        )
        return [_tables.Table(heads, rows, title, self._notes()), memory_table]

    def _notes(self) -> list[str]:
        notes = list(self.float8)
        if not all(row.aligned and row.aligned_tpu for row in self.rows):
            notes.append(
                f"GPU and TPU: whether k and n are multiples of "
                f"{GPU_MULTIPLE}, as Tensor Cores want them, and of "
                f"{TPU_MULTIPLE}, a TPU's tile. Where not, a product is "
                "padded and takes longer."
            )
        if (more := len(self.rows) - _SHOWN) > 0:
            notes.append(f"and {more} cheaper layers: `rows` holds all")
        if self.rows and not self.share_16bit:
            notes.append(
                "No product is in 16 bit: set a policy before you create the "
                "model, or convert it with `tfmix.apply_policy(model, 'auto')` "
                "or `tfmix convert`."
            )
        return notes

    def to_json(self) -> str:
        """Returns the advice as JSON."""
        return json.dumps(dataclasses.asdict(self), indent=2)


def advise(
    model: keras.Model,
    batch_size: int,
    *,
    input_shape: Any = None,
    target: str | None = None,
) -> Advice:
    """Finds the layers whose shapes slow 16-bit hardware down.

    It also estimates the memory of training, by kind, under each policy and
    with optimizers that need less. The model only runs on shapes, so nothing
    is computed.

    Args:
        model: A `keras.Model`. It is built if necessary.
        batch_size: Integer, rows of a training batch.
        input_shape: The shape of one row of every input, such as `(128,)`,
            for a model that is not built or has inputs of any length.
            Defaults to `None`: the model's own.
        target: The name of one of `targets()`. Its memory decides what fits
            in the 16-bit dtype of `"auto"` there. Defaults to `None`: the
            memory is not compared.

    Returns:
        An `Advice`: `rows`, `share_16bit`, `memory`, `fitting`, `float8`.

    Raises:
        TypeError: If `model` is not a Keras model, or `batch_size` not an
            integer.
        ValueError: If `batch_size` is below 1, the model's input shapes are
            not known or do not fit, or there is no such target.

    Examples:
        >>> layers = [keras.Input((64,)), keras.layers.Dense(10)]
        >>> advise(keras.Sequential(layers), 32).rows[0].padding
        'n 10 -> 16'
    """
    _arguments.model(model)
    size = _arguments.count("batch_size", batch_size, example=32)
    accelerator = None if target is None else targets.find(target)
    inputs = model_batches.inputs(model, size, input_shape)
    if not host.is_built(model):
        model(*inputs)
    policy = mixed_model.policy_of(model)
    if policy is not None and policies.with_rules(policy).is_float8:
        # Otherwise its first call would choose them.
        chosen_layers.choose(model, policies.with_rules(policy))
    uses = _uses(model, inputs)
    rows = [_row(use.layer, use.products) for use in uses if use.products]
    rows.sort(key=lambda row: -row.flops)
    work = sum(row.flops for row in rows)
    fast = sum(row.flops for row in rows if row.dtype in _formats.SIXTEEN_BIT)
    share = fast / work if work else 0.0
    memory = training_memory.by_way(model, sum(use.kept for use in uses))
    fitting = ""
    if accelerator is not None:
        memory = training_memory.of_target(memory, accelerator)
        fitting = training_memory.first_that_fits(memory, accelerator)
    return Advice(tuple(rows), share, memory, size, fitting, _float8(rows))


def _float8(rows: list[LayerProducts]) -> tuple[str, ...]:
    """Describes which layers are in float8, and why not others."""
    if not any(row.float8 for row in rows):
        return ()
    others: dict[str, list[str]] = {}
    for row in filter(lambda row: row.float8, rows):
        others.setdefault(row.float8, []).append(row.layer)
    chosen = others.pop("yes", [])
    sentences = [f"{len(chosen)} layers multiply in float8."]
    for why, names in others.items():
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        sentences.append(f"Not {', '.join(names[:3])}{more}: {why}.")
    return tuple(sentences)


def _row(layer: Any, products: tuple[Product, ...]) -> LayerProducts:
    why_not = chosen_layers.why_not(layer)
    gpu, tpu = (
        all(product.k % size == product.n % size == 0 for product in products)
        for size in (GPU_MULTIPLE, TPU_MULTIPLE)
    )
    return LayerProducts(
        layer.path or layer.name,
        str(layer.compute_dtype),
        tuple((product.m, product.k, product.n) for product in products),
        gpu,
        tpu,
        sum(product.flops for product in products),
        _padding(products[0]),
        "" if why_not is None else why_not or "yes",
    )


def _padding(product: Product) -> str:
    hints = []
    for name, size in (("k", product.k), ("n", product.n)):
        padded = -(-size // GPU_MULTIPLE) * GPU_MULTIPLE
        small = size < GPU_MULTIPLE * 2
        # Padding that adds more work costs more than it gains.
        if padded != size and (small or padded / size <= 1.25):
            hints.append(f"{name} {size} -> {padded}")
    return ", ".join(hints)


def _uses(model: keras.Model, inputs: list) -> list[Use]:
    """Runs a built model on shapes; returns the calls in the order they end."""
    layers = host.called(model)
    uses: list[Use] = []
    # On shapes, a recurrent layer calls its cell once, in place of every step.
    in_loops = {
        id(part)
        for layer in layers
        if isinstance(layer, keras.layers.RNN)
        for part in host.flat_layers(layer)[1:]
    }

    def make(index: int, original: Callable[..., Any]) -> Callable[..., Any]:
        layer = layers[index]

        def call(*args: Any, **kwargs: Any) -> Any:
            outputs = original(*args, **kwargs)
            inputs, results = _shapes((args, kwargs)), _shapes(outputs)
            products = tuple(_products(layer, inputs, results))
            kept = sum(map(math.prod, results))
            if isinstance(layer, keras.layers.RNN):
                kept = max(kept, _elements_of_loop(layer, inputs))
            elif id(layer) in in_loops or len(host.flat_layers(layer)) > 1:
                kept = 0
            uses.append(Use(layer, products, kept))
            return outputs

        return call

    with graphs.calls_replaced(layers, make):
        graphs.run_on_shapes(lambda *args: model(*args), inputs)
    return uses


def _shapes(nest: Any) -> Shapes:
    return [
        tuple(map(int, leaf.shape))
        for leaf in tree.flatten(nest)
        if hasattr(leaf, "shape") and None not in leaf.shape
    ]


def _products(layer: Any, inputs: Shapes, outputs: Shapes) -> list[Product]:
    names = {base.__name__ for base in type(layer).__mro__}
    for name, formula in _FORMULAS.items():
        if name in names and inputs and outputs:
            return formula(layer, inputs, outputs[0])
    return []


def _dense(layer: Any, inputs: Shapes, output: Shape) -> list[Product]:
    left, kernel, right = map(
        math.prod, (inputs[0], layer.kernel.shape, output)
    )
    # The three matrices have m k, k n and m n numbers.
    m = math.isqrt(left * right // kernel)
    return [Product(m, left // m, right // m)]


def _convolution(layer: Any, inputs: Shapes, output: Shape) -> list[Product]:
    *window, per_group, filters = tuple(layer.kernel.shape)
    groups = getattr(layer, "groups", 1)
    rows, k = math.prod(output) // filters, math.prod(window) * per_group
    return [Product(rows, k, filters // groups, groups)]


def _transposed(layer: Any, inputs: Shapes, output: Shape) -> list[Product]:
    *window, filters, channels = tuple(layer.kernel.shape)
    rows = math.prod(inputs[0]) // channels
    return [Product(rows, channels, math.prod(window) * filters)]


def _separable(layer: Any, inputs: Shapes, output: Shape) -> list[Product]:
    *_, channels, filters = tuple(layer.pointwise_kernel.shape)
    return [Product(math.prod(output) // filters, channels, filters)]


def _cells(layer: Any) -> list[Any]:
    """Returns a loop's cells; those of convolutions and others are left out."""
    return [
        cell
        for cell in getattr(layer.cell, "cells", [layer.cell])
        if hasattr(cell, "recurrent_kernel") and len(cell.kernel.shape) == 2
    ]


def _recurrent(layer: Any, inputs: Shapes, output: Shape) -> list[Product]:
    batch, steps = inputs[0][:2]
    products = []
    for cell in _cells(layer):
        for kernel, count in ((cell.kernel, 1), (cell.recurrent_kernel, steps)):
            k, n = kernel.shape
            products.append(Product(batch * steps // count, k, n, count))
    return products


def _elements_of_loop(layer: Any, inputs: Shapes) -> int:
    """Counts the gates and states of all time steps."""
    of_step = sum(
        cell.kernel.shape[-1] + sum(tree.flatten(cell.state_size))
        for cell in _cells(layer)
    )
    return math.prod(inputs[0][:2]) * int(of_step)


def _attention(layer: Any, inputs: Shapes, output: Shape) -> list[Product]:
    inner = range(1, len(inputs[0]) - 1)
    axes, width = host.attention_sizes(layer)
    # Without keys, the queries are the keys.
    queries, keys = (
        math.prod(shape[axis] for axis in axes or inner)
        for shape in (inputs * 2)[:2]
    )
    batch = math.prod(inputs[0][:-1]) // queries
    heads = getattr(layer, "num_heads", None) or layer.num_query_heads
    size = getattr(layer, "key_dim", None) or layer.head_dim
    return [
        Product(queries, size, keys, batch * heads),
        Product(queries, keys, width or size, batch * heads),
    ]


# The names are those of Keras's classes and bases, so subclasses count as well.
_FORMULAS: dict[str, Callable[[Any, Shapes, Shape], list[Product]]] = {
    "Dense": _dense,
    "EinsumDense": _dense,
    "BaseConv": _convolution,
    "BaseConvTranspose": _transposed,
    "BaseSeparableConv": _separable,
    "RNN": _recurrent,
    "MultiHeadAttention": _attention,
    "GroupedQueryAttention": _attention,
}
