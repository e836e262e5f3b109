"""Chooses the layers of a model that multiply in float8."""

import math
from collections.abc import Mapping
from typing import Any

import keras

from tfmix._keras import layers, variables
from tfmix.float8 import contraction, product
from tfmix.ops import apply
from tfmix.policy import float32_layers, op_lists
from tfmix.policy import policy as policies

_CLASSES = (keras.layers.Dense, keras.layers.EinsumDense)
# Tensor Cores only take matrices whose sides are multiples of this.
_MULTIPLE = 16
# Three products of (m, k, n) take 6 m k n operations, half as long in float8.
# Rounding their factors takes as long as moving this many bytes per number,
# fitted to 24 shapes timed on an H100 (docs/benchmarks.md, "On a GPU"). The
# fit is 6 % off at the shapes where float8 is as fast as bfloat16. (Finding
# the amax, reading the numbers again and writing them in two orders moves 6
# bytes per number, 10 for a float32 weight.)
CAST_BYTES = 11
# So float8 is faster on an H100 if 1/m + 1/k + 1/n is less than 6 times the
# seconds that an operation saves, times 3.35e12 bytes a second, over those
# bytes.
_PAYS = 6 * (1 / 989.4e12 - 1 / 1978.9e12) * 3.35e12 / CAST_BYTES
# A layer is chosen if it is faster with this many rows (tokens in a batch).
# With 1,024 rows no layer is.
_ROWS = 4096


def choose(
    model: keras.Model, policy: policies.Policy
) -> list[keras.Layer] | None:
    """Chooses the layers of a model that are faster in float8.

    Returns:
        The chosen layers; `None` if no layer that could be chosen is built.
    """
    every = layers.flat_layers(model)
    with_product = [layer for layer in every if isinstance(layer, _CLASSES)]
    built = [layer for layer in with_product if layer.built]
    if with_product and not built:
        return None
    ends = _ends(every)
    for layer in built:
        # Nested models may have chosen already; their choice is kept.
        if why_not(layer) is None:
            _mark(layer, _why_not(layer, policy, layer in ends))
    return chosen(model)


def chosen(model: keras.Model) -> list[keras.Layer]:
    """Returns the layers of a model that multiply in float8."""
    return [layer for layer, reason in reasons(model).items() if not reason]


def reasons(model: keras.Model) -> dict[keras.Layer, str]:
    """Returns the result of `why_not` for each layer that was considered."""
    return {
        layer: reason
        for layer in layers.flat_layers(model)
        if (reason := why_not(layer)) is not None
    }


def restore(model: keras.Model, before: Mapping[keras.Layer, str]) -> None:
    """Restores an earlier choice, which `reasons` returned."""
    for layer in layers.flat_layers(model):
        if layer in before or why_not(layer) is not None:
            _mark(layer, before.get(layer))


def _mark(layer: keras.Layer, reason: str | None) -> None:
    layers.mark(layer, float8=reason)
    multiply = product.contracted if reason == "" else None
    layers.put(layers.kernel_of(layer), apply.CHOSEN, multiply)


def why_not(layer: keras.Layer) -> str | None:
    """Returns why a layer does not multiply in float8, "" if it does.

    The result is `None` for a layer without a product, or without a float8
    policy.
    """
    return layers.marks(layer).float8


def gains(depth: int, width: int) -> bool:
    """Returns whether float8 is faster for a weight of this shape."""
    return 1 / _ROWS + 1 / depth + 1 / width < _PAYS


def _axes(layer: keras.Layer) -> Any:
    """Returns the axes of a layer's product, `None` for other computations."""
    equation = getattr(layer, "equation", op_lists.ROWS)
    rank = len(equation.split(",")[0].replace("...", ".").replace(" ", ""))
    return contraction.of_einsum(equation, (rank, len(layer.kernel.shape)))


def _ends(every: list[keras.Layer]) -> list[keras.Layer]:
    """Returns the first and the last layer that has a matrix."""
    with_matrix = [
        layer
        for layer in every
        if any(len(v.shape) > 1 for v in variables.own_variables(layer))
    ]
    return with_matrix[:1] + with_matrix[-1:]


def _why_not(layer: keras.Layer, policy: policies.Policy, is_end: bool) -> str:
    if type(layer).call not in [kind.call for kind in _CLASSES]:
        return "a `call` of its own"
    if layer.quantization_mode is not None:
        return f"quantized to {layer.quantization_mode}"
    if layer.compute_dtype != "bfloat16":
        return f"computes in {layer.compute_dtype}"
    wanted = policy.float8_layers
    if wanted is not None:
        path = layers.path_of(layer)
        if not any(
            float32_layers.matches(item, type(layer), layer.name, path)
            for item in wanted
        ):
            return "not in float8_layers"
    axes = _axes(layer)
    if axes is None:
        return "no product of two matrices"
    sizes = dict(zip(axes.weight, layer.kernel.shape, strict=True))
    depth = math.prod(sizes[letter] for letter in axes.summed)
    width = math.prod(sizes[letter] for letter in axes.new)
    if depth % _MULTIPLE or width % _MULTIPLE:
        return f"{depth} x {width} are not multiples of {_MULTIPLE}"
    if wanted is None and is_end:
        return "the first or the last with a matrix"
    if wanted is None and not gains(depth, width):
        return f"{depth} x {width} is too small to gain"
    return ""
