"""Runs the passes of a check, and judges each layer by them."""

import dataclasses
import functools
import math
import types
from typing import Any

import keras
import numpy as np
from keras import ops

from tfmix import _formats
from tfmix._keras import layers
from tfmix.loss_scaling import rules
from tfmix.ops import tensors
from tfmix.tools.diagnostics import batch as batches
from tfmix.tools.diagnostics import (
    differentiation,
    plans,
    probe,
    programs,
    ranges,
    runs,
    verdicts,
)

_Findings = list[verdicts.Finding]
# Float32 holds this scale.
_HIGHEST = 2.0**100


def find(
    batch: batches.Batch,
    planned: plans.Plan,
    limits: _formats.Format,
    rule: rules.LossScale,
    has_policy: bool,
) -> tuple[_Findings, runs.Judge]:
    """Runs the model in 16 bit, in float32, and then each call in both.

    Args:
        batch: The model and its data.
        planned: The dtypes of the 16-bit run.
        limits: The limits of the 16-bit format.
        rule: The rule of the optimizer's loss scale.
        has_policy: Whether the model has a policy of tfmix, so that it returns
            float32 and scales its gradients inside.

    Returns:
        One finding per layer and phase, the worst of a layer's calls; and the
        judge of the last pass, at the loss scale that fits best.
    """
    targets = probe.targets(batch.model)
    run = runs.sixteen_bit(batch, targets, planned)
    truth = None
    if batch.loss is not None:
        truth = runs.truth(batch, targets, run.signatures)
    judge = runs.Judge(batch, targets, run, truth, limits, has_policy)
    findings, judge = _find_scale(judge, rule)
    findings = _clear_outer(findings, targets)
    worst: dict[tuple[str, str], verdicts.Finding] = {}
    for finding in sorted(findings, key=lambda finding: finding.rank):
        worst.setdefault((finding.layer, finding.phase), finding)
    return list(worst.values()), judge


def _find_scale(
    judge: runs.Judge, rule: rules.LossScale
) -> tuple[_Findings, runs.Judge]:
    """Judges all calls at the loss scale that fits them best.

    It is the rule's first, which `fit` begins with, or a lower one if gradients
    overflow there.
    """
    first = float(rule.init()[0])
    judge = judge.at(first)
    if _scales_inside(judge) and judge.truth is not None:
        # At its first value, the loss scale moves nothing inside a model.
        power = judge.batch.power()
        if len(judge.run.output_dtypes) > 1:
            # Each head scales its own gradients, also those of a tiny loss.
            power = max(power, _room(judge))
        judge = dataclasses.replace(judge, unit=power / first)
    findings = _judge_all(judge)
    # A dynamic loss scale falls for as long as gradients overflow.
    while any(finding.gap.lost for finding in _sound_gradients(findings)):
        wanted = min(_room(judge), judge.loss_scale / 16.0)
        lower = float(rule.current(rule.init()._replace(scale=wanted)))
        if lower >= judge.loss_scale:
            break
        judge = judge.at(lower)
        findings = _judge_all(judge)
    return findings, judge


def _scales_inside(judge: runs.Judge) -> bool:
    """Returns whether the model scales its gradients, so that no loss is."""
    return (
        judge.has_policy
        and judge.limits is _formats.FLOAT16
        and not layers.has_sixteen_bit_variables(judge.batch.model)
    )


def _room(judge: runs.Judge) -> float:
    """Returns the largest loss scale at which all gradients fit float16."""
    truth = judge.truth
    if truth is None:
        return _HIGHEST
    sixteen = [
        tensor
        for key, tensors in truth.outputs.items()
        for tensor, dtype in zip(
            tensors, judge.run.signatures[key].outputs, strict=True
        )
        if dtype in _formats.SIXTEEN_BIT
    ]
    if not _scales_inside(judge):
        # A model that scales its gradients returns those of weights unscaled.
        sixteen += truth.weights
    largest = max(map(ranges.largest, sixteen), default=0.0) * judge.unit
    if largest == 0.0:
        return _HIGHEST
    # Two bits stay free for the sums inside a layer.
    room = math.floor(math.log2(_formats.FLOAT16.max / largest)) - 2
    return min(2.0**room, _HIGHEST)


def _judge_all(judge: runs.Judge) -> _Findings:
    """Judges each call of a float32 run, the weights, and the loss."""
    batch, signatures = judge.batch, judge.run.signatures
    findings: _Findings = []
    order, has_weights_before = 0, False

    def on_call(call: probe.Call) -> Any:
        nonlocal order, has_weights_before
        reaches_weights = has_weights_before
        outputs = call.proceed()
        has_weights_before |= bool(call.target.weights)
        if call.key in signatures:
            order += 1
            findings.extend(_judge_call(judge, call, order, reaches_weights))
        return outputs

    with runs.in_float32(batch.model):
        with probe.watched(judge.targets, on_call):
            outputs = batch.outputs(batch.weights())
    if batch.loss is not None:
        findings += _judge_loss(judge, outputs, order + 1)
    return findings


def _judge_call(
    judge: runs.Judge, call: probe.Call, order: int, reaches_weights: bool
) -> _Findings:
    """Judges a call by its results in 16 bit and in float32."""
    name, limits, gaps = call.target.name, judge.limits, judge.gaps(call)
    bad_input = verdicts.of_output(gaps.arguments, limits) != verdicts.OK
    verdict = verdicts.of_output(gaps.outputs, limits)
    forward = (name, verdicts.FORWARD, verdict, gaps.outputs, order, bad_input)
    findings: list[verdicts.Finding | None] = [verdicts.Finding(*forward)]
    if reaches_weights or call.target.weights:
        findings.append(
            verdicts.backward(name, order, gaps, limits, reaches_weights)
        )
    return list(filter(None, findings))


def _judge_loss(judge: runs.Judge, outputs: Any, order: int) -> _Findings:
    """Judges the loss on the float32 outputs, forward and backward."""
    batch, limits, dtypes = judge.batch, judge.limits, judge.run.output_dtypes
    exact = [ops.cast(leaf, "float32") for leaf in probe.floats(outputs)]
    near = [ops.cast(*pair) for pair in zip(exact, dtypes, strict=True)]

    def loss(leaves: list[Any]) -> list[Any]:
        if judge.has_policy:
            leaves = [ops.cast(leaf, "float32") for leaf in leaves]
        # A loss of several outputs has variables with the mean of each.
        with keras.StatelessScope():
            return [batch.loss_of(leaves, outputs)]

    def both(near: list[Any], exact: list[Any], scale: Any) -> Any:
        value, back = differentiation.pullback(loss, near)
        right, right_back = differentiation.pullback(loss, exact)
        one = ops.ones_like(value[0])
        gradient = back([one * ops.cast(scale, one.dtype)])
        return value, right, gradient, right_back([ops.ones_like(right[0])])

    value, right, gradient, right_gradient = programs.run(
        both, near, exact, np.float32(judge.scale)
    )
    forward = ranges.gap(value, right, limits)
    backward = ranges.gap(gradient, right_gradient, limits, judge.scale)
    verdict, note = verdicts.of_output(forward, limits), ""
    if verdict != verdicts.OK and tensors.is_16_bit(value[0]):
        note = f"the loss is computed in {probe.dtype(value[0])}"
    arguments = ranges.gap(near, exact, limits)
    finding = functools.partial(
        verdicts.Finding,
        verdicts.LOSS,
        order=order,
        bad_input=verdicts.of_output(arguments, limits) != verdicts.OK,
        is_own=isinstance(batch.loss, types.FunctionType),
    )
    back = verdicts.of_gradient(backward, limits)
    return [
        finding(verdicts.FORWARD, verdict, forward, note=note),
        finding(verdicts.BACKWARD, back, backward),
    ]


def _sound_gradients(findings: _Findings) -> _Findings:
    """Returns the findings on gradients of layers whose results are fine."""
    backward = verdicts.BACKWARD
    bad_forward = {
        finding.layer
        for finding in findings
        if finding.phase != backward and finding.verdict != verdicts.OK
    }
    return [
        finding
        for finding in findings
        if finding.phase == backward and finding.layer not in bad_forward
    ]


def _clear_outer(
    findings: list[verdicts.Finding], targets: list[probe.Target]
) -> list[verdicts.Finding]:
    """Clears layers of faults that their inner layers cause."""
    own: dict[str, list[str]] = {finding.phase: [] for finding in findings}
    for finding in findings:
        if finding.verdict != verdicts.OK and not finding.bad_input:
            own[finding.phase].append(finding.layer)
    cleared = {phase: probe.around(own[phase], targets) for phase in own}
    return [
        dataclasses.replace(finding, verdict=verdicts.OK)
        if finding.layer in cleared[finding.phase]
        else finding
        for finding in findings
    ]
