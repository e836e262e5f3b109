"""Faults that a layer's making shows, and this batch need not."""

import functools
import numbers
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from tfmix import _formats
from tfmix._keras import layers as host
from tfmix._keras import variables
from tfmix.conversion import planned_policies
from tfmix.doctor import probe, ranges, runs, verdicts
from tfmix.in_force.layer import code_constants
from tfmix.in_force.model import model_outputs
from tfmix.scaling import rules

# Share of a model's probabilities below the normal range that is a fault.
LOW_SHARE = 0.1
LOWEST_SCALE = rules.DynamicLossScale().lowest_scale
# Bits kept free at the lowest scale, for the next batch's gradients: over 200
# steps they come to 3 times those at the start.
_FREE_BITS = 2
# A constant guards against an input that is zero, or one that drives some
# value inside to zero, as large logits do behind a softmax.
_PROBES = (0.0, 64.0)


def probabilities(
    judge: runs.Judge, call: probe.Call, order: int, gap: ranges.Gap
) -> verdicts.Finding | None:
    """Judges probabilities that the model returns in 16 bit.

    Where a class is rounded to 0, no gradient of the loss can raise it.
    """
    signature = judge.run.signatures[call.key]
    dtypes = _sixteen_bit(signature.outputs)
    if not (signature.is_output and dtypes):
        return None
    outputs = judge.exact(call, call.tensors)
    if not _are_probabilities(call.target.operation, outputs):
        return None
    low = gap.flushed + gap.subnormal > LOW_SHARE
    if not low and _is_undone(call.target.operation, judge.batch.loss):
        return None
    verdict = verdicts.UNDERFLOW if low else verdicts.INACCURATE
    note = f"the model's probabilities are left in {dtypes[0]}"
    fields = (call.target.name, verdicts.FORWARD, verdict, gap, order)
    return verdicts.Finding(*fields, latent=True, note=note)


def _is_undone(operation: Any, loss: Any) -> bool:
    """Says whether no loss sees the rounding of what makes probabilities."""
    losses = host.called_losses(loss)
    undone = [model_outputs.is_undone(operation, called) for called in losses]
    return bool(losses) and all(undone)


def _sixteen_bit(dtypes: Sequence[str]) -> list[str]:
    return [name for name in dtypes if name in _formats.SIXTEEN_BIT]


def _are_probabilities(operation: Any, outputs: list[Any]) -> bool:
    """Knows them by what makes them, or since they sum to 1."""
    known = (keras.activations.softmax, keras.activations.sigmoid)
    if getattr(operation, "activation", None) in known:
        return True
    for leaf in outputs:
        if len(leaf.shape) >= 2 and leaf.shape[-1] >= 2:
            values = np.asarray(ops.convert_to_numpy(leaf))
            inside = np.all((values >= 0) & (values <= 1))
            sums = values.sum(-1, dtype=np.float64)
            if inside and np.allclose(sums, 1.0, atol=1e-3):
                return True
    return False


def looks_like_probabilities(output: Any) -> Any:
    """Returns a float32 scalar of a traced step: 1 if rows sum to 1."""
    if len(output.shape) < 2 or output.shape[-1] in (None, 1):
        return ops.zeros(())
    values = ops.cast(output, "float32")
    inside = ops.all((values >= 0) & (values <= 1))
    away = ops.max(ops.abs(ops.sum(values, -1) - 1.0))
    # The values may be in 16 bit, where bfloat16 rounds by up to 0.004.
    return ops.cast(inside & (away <= 0.01), "float32")


def no_room(
    layer: str,
    order: int,
    gaps: Sequence[ranges.Gap | None],
    dtypes: Sequence[str],
) -> verdicts.Finding | None:
    """Judges gradients at the lowest scale, of a layer that has `dtypes`."""
    sixteen = _sixteen_bit(dtypes)
    # Beyond one bit too many, what is not lost was not made in 16 bit.
    tight = [
        gap
        for gap in gaps
        if gap and not gap.broken and -1 <= gap.headroom_bits < _FREE_BITS
    ]
    if not sixteen or not tight:
        return None
    worst = min(tight, key=lambda gap: gap.headroom_bits)
    note = (
        f"at a loss scale of {LOWEST_SCALE:g}, the lowest, its gradient "
        f"reaches {worst.largest:.3g}, close to the end of {sixteen[0]}"
    )
    fields = (layer, verdicts.BACKWARD, verdicts.OVERFLOW, worst, order)
    return verdicts.Finding(*fields, latent=True, note=note)


def vanishing_constant(
    judge: runs.Judge, call: probe.Call, order: int, gap: ranges.Gap
) -> verdicts.Finding | None:
    """Judges a layer whose epsilon is zero in 16 bit, and is needed."""
    limits = judge.limits
    constants = [
        value
        for value in _constants(call.target.operation)
        if 0.0 < value <= limits.smallest / 2
    ]
    fails = functools.partial(_fails, judge, call)
    if not constants or not any(map(fails, _PROBES)):
        return None
    note = f"its {max(constants):g} is 0 in {limits.name}"
    name, verdict = call.target.name, verdicts.UNDERFLOW
    fields = (name, verdicts.FORWARD, verdict, gap, order)
    return verdicts.Finding(*fields, latent=True, note=note)


def _constants(operation: Any) -> list[float]:
    """Lists attributes called epsilon, and what the user's code reads."""
    named = [
        float(value)
        for name in ("epsilon", "eps", "_epsilon", "_eps")
        if isinstance(value := vars(operation).get(name), numbers.Real)
    ]
    return named + [
        value
        for function in code_constants.functions(operation)
        for value, _ in code_constants.floats(function, operation)
    ]


def _fails(judge: runs.Judge, call: probe.Call, factor: float) -> bool:
    """Says whether a call fails in 16 bit alone, on inputs times a factor."""
    exact = [ops.cast(leaf, "float32") * factor for leaf in call.tensors]
    signature = judge.run.signatures[call.key]
    near = [
        ops.cast(leaf, dtype)
        for leaf, dtype in zip(exact, signature.arguments, strict=True)
    ]
    right = _finite(near) and _finite(judge.exact(call, exact))
    return right and not _finite(judge.near(call, near))


def _finite(tensors: list[Any]) -> bool:
    return all(bool(ops.all(ops.isfinite(tensor))) for tensor in tensors)


def weights(
    targets: Sequence[probe.Target],
    planned: planned_policies.Plan,
    limits: _formats.Format,
) -> list[verdicts.Finding]:
    """Judges all weights that are read in 16 bit, used in the batch or not."""
    result = []
    for order, target in enumerate(targets):
        if values := _cast_weights(target, planned):
            # On the host: a device compiles a cast for each shape.
            with np.errstate(over="ignore"):
                near = [value.astype(limits.name) for value in values]
            gap = ranges.gap(near, values, limits)
            verdict = verdicts.of_output(gap, limits)
            fields = (target.name, verdicts.WEIGHTS, verdict, gap, order)
            result.append(verdicts.Finding(*fields))
    return result


def _cast_weights(
    target: probe.Target, planned: planned_policies.Plan
) -> list[Any]:
    if not isinstance(target.operation, keras.Layer):
        return []
    # Layers without autocast, such as the normalisations, cast by themselves
    # where they need float32; an embedding casts what it looked up.
    return [
        ops.convert_to_numpy(variable.value)
        for layer in (target.layers if target.whole else [target.operation])
        if planned_policies.dtype(planned, layer) in _formats.SIXTEEN_BIT
        and (layer.autocast or isinstance(layer, keras.layers.Embedding))
        for variable in variables.own_trainable(layer)
    ]
