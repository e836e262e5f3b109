"""Measures the float8 products of the chosen layers against float32."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from tfmix import _tables
from tfmix._keras import layers
from tfmix.conversion import planned_policies
from tfmix.float8 import chosen_layers, product
from tfmix.tools.diagnostics import batch as batches
from tfmix.tools.diagnostics import differentiation, probe, runs, verdicts

PRODUCTS = ("forward", "input gradient", "kernel gradient")
# Training in float8 is as good as in bfloat16 if gradients turn no further.
_LEAST_COSINE = 0.98
# The small numbers of an activation may underflow without harm. They count as
# a fault only if the rows of the result change.
_MOST_UNDERFLOW = 0.1
_HEADS = ("layer", "in float8", "verdict", "underflow", "saturated", "cosine")


@dataclasses.dataclass(frozen=True)
class Float8Product:
    """One product of a layer in float8, compared with float32.

    Attributes:
        layer: The layer's path.
        product: `"forward"`, `"input gradient"` or `"kernel gradient"`.
        verdict: `"ok"`, `"underflow"`, `"inaccurate"` or `"not_finite"`.
        underflow: The share of nonzero numbers of a factor that become zero,
            0 to 1; that of the worse factor.
        saturated: The share of all numbers of a factor that leave the format,
            0 to 1; that of the worse factor.
        cosine: The cosine of the angle between both results, -1 to 1.
    """

    layer: str
    product: str
    verdict: str
    underflow: float
    saturated: float
    cosine: float

    @property
    def is_fine(self) -> bool:
        """True if the layer can stay in float8."""
        return self.verdict == verdicts.OK


def measure(batch: batches.Batch) -> tuple[Float8Product, ...]:
    """Measures the products of a model's float8 layers, the worst first.

    They have the inputs and gradients of float32. A layer that is called twice
    has the worse of its calls.
    """
    chosen = chosen_layers.chosen(batch.model)
    if batch.loss is None or not chosen:
        return ()
    targets = [probe.Target(layer, layer.name, (), True) for layer in chosen]
    worst: dict[tuple[str, str], Float8Product] = {}

    def on_call(call: probe.Call) -> Any:
        layer, (gradient,) = call.target.operation, gradients[call.key]
        table = _measure_call(layer, call.tensors[0], gradient)
        for name, row in zip(PRODUCTS, np.asarray(table), strict=True):
            judged = _judged(layers.path_of(layer), name, *map(float, row))
            before = worst.setdefault((judged.layer, name), judged)
            worst[judged.layer, name] = min(before, judged, key=_severity)
        return call.proceed()

    with runs.in_float32(batch.model):
        plan = planned_policies.reference(batch.model)
        calls = runs.sixteen_bit(batch, targets, plan, "float32").signatures
        gradients = runs.truth(batch, targets, calls).outputs
        with probe.watched(targets, on_call):
            batch.outputs(batch.weights())
    return tuple(sorted(worst.values(), key=_severity))


def _severity(judged: Float8Product) -> tuple[bool, float]:
    return judged.is_fine, judged.cosine


def table(products: Sequence[Float8Product]) -> _tables.Table:
    """Returns a table of some products."""
    rows = [
        (
            judged.layer,
            judged.product,
            judged.verdict,
            f"{judged.underflow:.1%}",
            f"{judged.saturated:.1%}",
            f"{judged.cosine:.4f}",
        )
        for judged in products
    ]
    return _tables.Table(_HEADS, rows, verdicts=[x.verdict for x in products])


def _judged(
    path: str,
    name: str,
    underflow: float,
    saturated: float,
    cosine: float,
    of_rows: float,
) -> Float8Product:
    verdict = verdicts.OK if cosine >= _LEAST_COSINE else verdicts.INACCURATE
    if underflow > _MOST_UNDERFLOW and of_rows < _LEAST_COSINE:
        verdict = verdicts.UNDERFLOW
    if saturated or not math.isfinite(cosine):
        verdict = verdicts.NOT_FINITE
    return Float8Product(path, name, verdict, underflow, saturated, cosine)


def _measure_call(layer: keras.Layer, inputs: Any, gradient: Any) -> Any:
    """Measures the three products of one call.

    Each has the shares that underflow and saturate, the cosine, and the mean
    cosine of the rows.
    """
    inputs = ops.cast(inputs, "float32")
    kernel = ops.cast(layer.kernel, "float32")
    bias = 0.0 if layer.bias is None else ops.cast(layer.bias, "float32")
    if layer.activation is not None:
        before = chosen_layers.exact(layer, inputs, kernel) + bias
        _, back = differentiation.pullback(
            lambda tensors: [layer.activation(tensors[0])], [before]
        )
        (gradient,) = back([gradient])
    a, b, c = chosen_layers.matrices(layer, inputs, kernel, gradient)
    forward, back_format = product.FORWARD, product.GRADIENT
    return ops.stack(
        [
            _measure_product(a, b, forward, forward),
            _measure_product(c, ops.transpose(b), back_format, forward),
            _measure_product(ops.transpose(a), c, forward, back_format),
        ]
    )


def _measure_product(
    a: Any, b: Any, to_a: product.Format, to_b: product.Format
) -> Any:
    (near_a, *lost_a), (near_b, *lost_b) = _round(a, to_a), _round(b, to_b)
    near, exact = ops.matmul(near_a, near_b), ops.matmul(a, b)
    lost = [ops.maximum(*pair) for pair in zip(lost_a, lost_b, strict=True)]
    whole = _cosines(ops.reshape(near, (1, -1)), ops.reshape(exact, (1, -1)))
    return ops.stack([*lost, whole, _cosines(near, exact)])


def _round(tensor: Any, to: product.Format) -> tuple[Any, Any, Any]:
    """Returns a tensor in float8, still scaled, and the shares it loses."""
    near, _ = product.rounded(ops.cast(tensor, "bfloat16"), to)
    near = ops.cast(near, "float32")
    nonzero, fine = tensor != 0, ops.isfinite(tensor)
    flushed = ops.sum(ops.cast(nonzero & (near == 0), "float32"))
    count = ops.maximum(ops.sum(ops.cast(nonzero, "float32")), 1.0)
    left = ops.mean(ops.cast(fine & ~ops.isfinite(near), "float32"))
    return near, flushed / count, left


def _cosines(near: Any, exact: Any) -> Any:
    """Returns the mean of the rows' cosines; 1 where both are zero."""
    # Squares of 1e30 would overflow float32, so the largest value is the unit.
    near, exact = (
        matrix / ops.maximum(ops.max(ops.abs(matrix), -1, keepdims=True), 1e-37)
        for matrix in (near, exact)
    )
    size = ops.sum(near * near, -1) * ops.sum(exact * exact, -1)
    both = ops.sum(near * exact, -1) / ops.sqrt(ops.maximum(size, 1e-30))
    empty = ops.max(ops.abs(exact), -1) == 0
    return ops.mean(ops.where(empty, ops.ones_like(both), both))
