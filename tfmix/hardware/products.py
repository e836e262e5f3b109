"""The matrix products of a model: their shapes, and what they cost."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import keras
from keras import tree

from tfmix._keras import layers as host

Shape = tuple[int, ...]
Shapes = list[Shape]


@dataclasses.dataclass(frozen=True)
class Product:
    """A matrix product `(m, k) x (k, n)`, made `count` times a forward pass."""

    m: int
    k: int
    n: int
    count: int = 1

    @property
    def flops(self) -> int:
        """Multiplications and additions of all of them."""
        return 2 * self.m * self.k * self.n * self.count


@dataclasses.dataclass(frozen=True)
class Use:
    """One call of a layer: its products, and how many elements it returns."""

    layer: keras.Layer
    products: tuple[Product, ...]
    outputs: int
    has_parts: bool  # whether other layers are called inside it


def uses(model: keras.Model, batch_size: int) -> list[Use]:
    """Runs a built model on shapes alone; returns the calls as they end."""
    inputs = host.symbolic_arguments(model)
    if not inputs:
        raise ValueError(
            "The model's input shapes are not known. Received: "
            f"model={model!r}. Call it once on a batch."
        )
    inputs = tree.map_structure(lambda one: _fixed(one, batch_size), inputs)
    layers = [
        layer
        for layer in host.flat_layers(model)
        if not isinstance(layer, keras.layers.InputLayer)
    ]
    found: list[Use] = []

    def make(index: int, original: Callable[..., Any]) -> Callable[..., Any]:
        layer = layers[index]

        def call(*args: Any, **kwargs: Any) -> Any:
            outputs = original(*args, **kwargs)
            given, made = _shapes((args, kwargs)), _shapes(outputs)
            multiplied = tuple(_products(layer, given, made))
            elements = sum(map(math.prod, made))
            has_parts = len(host.flat_layers(layer)) > 1
            found.append(Use(layer, multiplied, elements, has_parts))
            return outputs

        return call

    with host.calls_replaced(layers, make):
        host.run_on_shapes(lambda *args: model(*args), inputs)
    return found


def _fixed(tensor: Any, batch_size: int) -> Any:
    shape = (batch_size, *tensor.shape[1:])
    if None in shape:
        raise ValueError(
            "Every dimension of an input besides the first must be known, to "
            f"count products. Received: an input of shape {tensor.shape!r}. "
            "Build the model for one length, such as keras.Input((128,))."
        )
    return keras.KerasTensor(shape, tensor.dtype)


def _shapes(nest: Any) -> Shapes:
    return [
        tuple(map(int, leaf.shape))
        for leaf in tree.flatten(nest)
        if hasattr(leaf, "shape") and None not in leaf.shape
    ]


def _products(layer: Any, given: Shapes, made: Shapes) -> list[Product]:
    names = {base.__name__ for base in type(layer).__mro__}
    for name, formula in _FORMULAS.items():
        if name in names and given and made:
            return formula(layer, given, made[0])
    return []


def _dense(layer: Any, given: Shapes, made: Shape) -> list[Product]:
    return [Product(math.prod(made[:-1]), given[0][-1], made[-1])]


def _einsum(layer: Any, given: Shapes, made: Shape) -> list[Product]:
    kernel = tuple(layer.kernel.shape)
    left, right, out = layer.equation.replace("->", ",").split(",")
    # An ellipsis stands for leading dimensions, which are rows.
    sizes = dict(zip(reversed(right), reversed(kernel), strict=False))
    summed = [label for label in right if label in left and label not in out]
    k = math.prod(sizes[label] for label in summed)
    n = math.prod(kernel) // max(k, 1)
    return [Product(math.prod(made) // max(n, 1), k, n)]


def _convolution(layer: Any, given: Shapes, made: Shape) -> list[Product]:
    *window, per_group, filters = tuple(layer.kernel.shape)
    groups = getattr(layer, "groups", 1)
    rows, k = math.prod(made) // filters, math.prod(window) * per_group
    return [Product(rows, k, filters // groups, groups)]


def _transposed(layer: Any, given: Shapes, made: Shape) -> list[Product]:
    *window, filters, channels = tuple(layer.kernel.shape)
    rows = math.prod(given[0]) // channels
    return [Product(rows, channels, math.prod(window) * filters)]


def _separable(layer: Any, given: Shapes, made: Shape) -> list[Product]:
    *_, channels, filters = tuple(layer.pointwise_kernel.shape)
    return [Product(math.prod(made) // filters, channels, filters)]


def _recurrent(layer: Any, given: Shapes, made: Shape) -> list[Product]:
    batch, steps, features = given[0]
    units, wide = layer.cell.units, layer.cell.kernel.shape[-1]
    return [
        Product(batch * steps, features, wide),
        Product(batch, units, wide, steps),
    ]


def _attention(layer: Any, given: Shapes, made: Shape) -> list[Product]:
    batch, queries = given[0][0], math.prod(given[0][1:-1])
    keys = math.prod(given[1][1:-1]) if len(given) > 1 else queries
    heads = getattr(layer, "num_heads", None) or layer.num_query_heads
    size = getattr(layer, "key_dim", None) or layer.head_dim
    width = getattr(layer, "_value_dim", None) or size
    return _two_products(queries, size, keys, width, batch * heads)


def _dot_attention(layer: Any, given: Shapes, made: Shape) -> list[Product]:
    batch, queries, size = given[0]
    return _two_products(queries, size, given[1][1], made[-1], batch)


def _two_products(
    queries: int, size: int, keys: int, width: int, count: int
) -> list[Product]:
    scores = Product(queries, size, keys, count)
    return [scores, Product(queries, keys, width, count)]


# By the names of Keras's classes and bases, so that subclasses count, too.
_FORMULAS: dict[str, Callable[[Any, Shapes, Shape], list[Product]]] = {
    "Dense": _dense,
    "EinsumDense": _einsum,
    "BaseConv": _convolution,
    "BaseConvTranspose": _transposed,
    "BaseSeparableConv": _separable,
    "LSTM": _recurrent,
    "GRU": _recurrent,
    "SimpleRNN": _recurrent,
    "MultiHeadAttention": _attention,
    "GroupedQueryAttention": _attention,
    "Attention": _dot_attention,
}
