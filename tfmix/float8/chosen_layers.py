"""The layers of a model that multiply in float8, and how they call it."""

import math
import string
from collections.abc import Callable, Mapping
from typing import Any

import keras
from keras import ops

from tfmix import _h200
from tfmix._keras import layer_policies, layers, variables
from tfmix.float8 import product
from tfmix.policy import layer_rules
from tfmix.policy import policy as policies

# On a layer that was looked at: why it is left out, "" if it is chosen.
_REASON = "_tfmix_no_float8"
_CLASSES = (keras.layers.Dense, keras.layers.EinsumDense)
# Tensor Cores take no others.
_MULTIPLE = 16
# A number: to find the amax of a factor, read it again and write it in 8 bits.
CAST_BYTES = 2 + 2 + 1
# Three products of (m, k, n) take an H200 6 m k n operations, half as long in
# float8; their factors' bytes are CAST_BYTES (mk + kn + mn). So it pays where
# 1/m + 1/k + 1/n is less than this, 1/344; m, the batch, is large.
_SAVED = 1 / _h200.SIXTEEN_BIT - 1 / _h200.FLOAT8
_PAYS = 6 * _SAVED * _h200.BANDWIDTH / CAST_BYTES


def choose(
    model: keras.Model, policy: policies.Policy
) -> list[keras.Layer] | None:
    """Lets those of a model's layers that gain multiply in float8.

    Returns:
        The chosen layers; `None` before any that could be is built.
    """
    every = layers.flat_layers(model)
    with_product = [layer for layer in every if isinstance(layer, _CLASSES)]
    built = [layer for layer in with_product if layer.built]
    if with_product and not built:
        return None
    ends = _ends(every)
    for layer in built:
        # What a model inside has chosen by itself stands.
        if why_not(layer) is None:
            reason = _why_not(layer, policy, layer in ends)
            layer_policies.put(layer, _REASON, reason)
    return chosen(model)


def chosen(model: keras.Model) -> list[keras.Layer]:
    """Returns the layers of a model that multiply in float8."""
    return [layer for layer, reason in reasons(model).items() if not reason]


def reasons(model: keras.Model) -> dict[keras.Layer, str]:
    """Returns what `why_not` says of the layers that were looked at."""
    return {
        layer: reason
        for layer in layers.flat_layers(model)
        if (reason := why_not(layer)) is not None
    }


def restore(model: keras.Model, before: Mapping[keras.Layer, str]) -> None:
    """Chooses the layers again that `reasons` told of, and no others."""
    for layer in layers.flat_layers(model):
        vars(layer).pop(_REASON, None)
        if layer in before:
            layer_policies.put(layer, _REASON, before[layer])


def why_not(layer: keras.Layer) -> str | None:
    """Returns why a layer does not multiply in float8, "" if it does.

    `None` if it has no product, or is under no policy for float8.
    """
    reason: str | None = vars(layer).get(_REASON)
    return reason


def call_of(layer: keras.Layer, original: Callable) -> Callable:
    """Returns what computes a layer's result: in float8, if it is chosen."""
    # Somebody may have given it another policy since.
    if why_not(layer) != "" or layer.compute_dtype != "bfloat16":
        return original

    def call(inputs: Any, *args: Any, **kwargs: Any) -> Any:
        equation = _equation(layer, len(inputs.shape))
        outputs = einsum(
            equation,
            ops.cast(inputs, layer.compute_dtype),
            ops.cast(layer.kernel, layer.compute_dtype),
        )
        if layer.bias is not None:
            outputs = ops.add(outputs, layer.bias)
        if layer.activation is not None:
            outputs = layer.activation(outputs)
        return outputs

    return call


def einsum(equation: str, inputs: Any, kernel: Any) -> Any:
    """Computes an einsum that is one matrix product, in float8."""
    free, _, new, outputs = _parts(equation)
    left, right = equation.split("->")[0].split(",")
    sizes = {letter: kernel.shape[i] for i, letter in enumerate(right)}
    shape = ops.shape(inputs)
    sizes |= {letter: shape[left.index(letter)] for letter in free}
    result = product.product(*_factors(equation, inputs, kernel))
    result = ops.reshape(result, [sizes[letter] for letter in free + new])
    return ops.transpose(
        result, [(free + new).index(letter) for letter in outputs]
    )


def exact(layer: keras.Layer, inputs: Any, kernel: Any) -> Any:
    """Computes a layer's product as its inputs' dtype does."""
    return ops.einsum(_equation(layer, len(inputs.shape)), inputs, kernel)


def matrices(
    layer: keras.Layer, inputs: Any, kernel: Any, gradient: Any
) -> tuple[Any, Any, Any]:
    """Returns what a layer multiplies as matrices (m, k), (k, n), (m, n).

    The last is the gradient of the product, which is that of the layer's
    outputs before bias and activation.
    """
    equation = _equation(layer, len(inputs.shape))
    free, _, new, outputs = _parts(equation)
    width = math.prod(gradient.shape[outputs.index(letter)] for letter in new)
    gradient = _matrix(gradient, outputs, free + new, width)
    return *_factors(equation, inputs, kernel), gradient


def _factors(equation: str, inputs: Any, kernel: Any) -> tuple[Any, Any]:
    free, summed, new, _ = _parts(equation)
    left, right = equation.split("->")[0].split(",")
    width = math.prod(kernel.shape[right.index(letter)] for letter in new)
    depth = math.prod(kernel.shape[right.index(letter)] for letter in summed)
    return (
        _matrix(inputs, left, free + summed, depth),
        _matrix(kernel, right, summed + new, width),
    )


def _matrix(tensor: Any, letters: str, order: str, width: int) -> Any:
    tensor = ops.transpose(tensor, [letters.index(letter) for letter in order])
    return ops.reshape(tensor, (-1, width))


def _parts(equation: str) -> tuple[str, str, str, str]:
    """Returns the letters that go through, are summed, are new; the result's.

    All empty if the equation is no product of two matrices.
    """
    factors, outputs = equation.split("->")
    left, right = factors.split(",")
    free = "".join(letter for letter in left if letter not in right)
    summed = "".join(letter for letter in right if letter in left)
    new = "".join(letter for letter in right if letter not in left)
    every = left + new
    is_product = len(set(every)) == len(every) and len(set(right)) == len(right)
    if not (is_product and summed and sorted(outputs) == sorted(free + new)):
        return "", "", "", ""
    return free, summed, new, outputs


def _equation(layer: keras.Layer, rank: int | None = None) -> str:
    """Returns what a layer computes, with a letter for each of its axes."""
    equation = getattr(layer, "equation", "...x,xy->...y").replace(" ", "")
    named = len(equation.split(",")[0].replace("...", ""))
    unused = sorted(set(string.ascii_letters) - set(equation))
    more = 1 if rank is None else rank - named
    return equation.replace("...", "".join(unused[:more]))


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
        path = layer_policies.path_of(layer)
        if not any(
            layer_rules.matches(item, type(layer), layer.name, path)
            for item in wanted
        ):
            return "not in float8_layers"
    _, summed, new, _ = _parts(equation := _equation(layer))
    if not summed:
        return "no product of two matrices"
    right = equation.split("->")[0].split(",")[1]
    sizes = dict(zip(right, layer.kernel.shape, strict=True))
    depth = math.prod(sizes[letter] for letter in summed)
    width = math.prod(sizes[letter] for letter in new)
    if depth % _MULTIPLE or width % _MULTIPLE:
        return f"{depth} x {width} are no multiples of {_MULTIPLE}"
    if wanted is None and is_end:
        return "the first or the last with a matrix"
    if wanted is None and 1 / depth + 1 / width > _PAYS:
        return f"{depth} x {width} is too small to gain"
    return ""
