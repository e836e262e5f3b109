"""The loss, judged like a layer, and the loss scale it is judged under."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from tfmix import _formats
from tfmix.doctor import batch as batches
from tfmix.doctor import gaps, one_layer, probe, pullback, verdicts, whole_model


def scale(
    run: whole_model.SixteenBitRun,
    truth: whole_model.Truth | None,
    limits: _formats.Format,
    bounds: tuple[float, float],
) -> float:
    """Returns the power of two that dynamic scaling would settle at.

    `bounds` are the highest and the lowest; bfloat16 has float32's range: 1.
    """
    if limits.name != _formats.FLOAT16.name or truth is None:
        return 1.0
    highest, lowest = bounds
    sixteen = [
        tensor
        for key, tensors in truth.outputs.items()
        for tensor, dtype in zip(
            tensors, run.signatures[key].outputs, strict=True
        )
        if dtype in _formats.SIXTEEN_BIT
    ]
    largest = max(map(_largest, [*truth.weights, *sixteen]), default=0.0)
    if largest == 0.0:
        return highest
    # Two bits are kept free for the sums inside a layer.
    fitting = 2.0 ** (math.floor(math.log2(limits.max / largest)) - 2)
    return min(max(fitting, lowest), highest)


def findings(
    batch: batches.Batch, outputs: Any, judge: one_layer.Judge, order: int
) -> list[verdicts.Finding]:
    """Judges the loss on the float32 outputs, forward and backward."""
    limits = judge.limits
    exact = [ops.cast(leaf, "float32") for leaf in probe.floats(outputs)]
    near = [
        ops.cast(leaf, dtype)
        for leaf, dtype in zip(exact, judge.run.output_dtypes, strict=True)
    ]

    def loss(leaves: list[Any]) -> list[Any]:
        # The loss of several outputs keeps a mean of each in variables.
        with keras.StatelessScope():
            return [batch.loss_of(leaves, outputs)]

    truth, truth_back = pullback.pullback(loss, exact)
    found, found_back = pullback.pullback(loss, near)
    forward = gaps.gap(found, truth, limits)
    right = truth_back([ops.ones_like(truth[0])])
    one = ops.ones_like(found[0])
    wrong = found_back([one * ops.cast(judge.scale, one.dtype)])
    backward = gaps.gap(wrong, right, limits, judge.scale)
    verdict, note = verdicts.of_output(forward, limits), ""
    dtype = probe.dtype(one)
    if verdict != verdicts.OK and dtype in _formats.SIXTEEN_BIT:
        note = f"the loss is computed in {dtype}"
    name, back = verdicts.LOSS, verdicts.of_gradient(backward, limits)
    return [
        verdicts.Finding(
            name, verdicts.FORWARD, verdict, forward, order, note=note
        ),
        verdicts.Finding(name, verdicts.BACKWARD, back, backward, order),
    ]


def blamed(
    found: Sequence[verdicts.Finding], limits: _formats.Format
) -> list[verdicts.Finding]:
    """Blames a loss out of range for gradients no loss scale brings back.

    A sum over pixels is fine in float32, and so is the gradient of each pixel;
    those of the weights overflow.
    """
    forward = [one for one in found if one.phase != verdicts.BACKWARD]
    (loss,) = (one for one in forward if one.layer == verdicts.LOSS)
    faulty = any(one.verdict != verdicts.OK for one in forward)
    if faulty or loss.gap.headroom_bits >= 0:
        return list(found)
    reached = limits.max * 2.0 ** -(loss.gap.headroom_bits + 1)
    note = f"the loss reaches {reached:.3g}: gradients overflow at scale 1"
    guilty = dataclasses.replace(
        loss, phase=verdicts.BACKWARD, verdict=verdicts.OVERFLOW, note=note
    )
    return [*found, guilty]


def _largest(tensor: Any) -> float:
    if not math.prod(tensor.shape):
        return 0.0
    finite = ops.where(ops.isfinite(tensor), ops.abs(tensor), 0.0)
    return float(ops.max(finite))
