"""One check of one model: the passes, and what each layer was found to do."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from tfmix import _formats
from tfmix._keras import layers
from tfmix.conversion import trial_policies
from tfmix.doctor import batch as batches
from tfmix.doctor import (
    epsilons,
    heads,
    loss,
    one_layer,
    probe,
    room,
    verdicts,
    weights,
    whole_model,
)
from tfmix.doctor import gaps as compare

# Where dynamic loss scaling starts; its rule's default.
LOSS_SCALE = 2.0**15
# Where it ends, at the lowest.
FLOOR = 1.0
# Factor between two scales that are tried when gradients overflow.
_STEP_DOWN = 16.0


class Visit:
    """One check: what was found so far."""

    def __init__(
        self,
        batch: batches.Batch,
        found: Sequence[probe.Target],
        sixteen: trial_policies.Plan,
        limits: _formats.Format,
        highest: float = LOSS_SCALE,
    ) -> None:
        self.batch = batch
        self.found = found
        self.limits = limits
        self.classes = {
            target.name: type(target.operation).__name__ for target in found
        }
        self.findings: list[verdicts.Finding] = []
        self._sixteen = sixteen
        self._reference = trial_policies.reference(batch.model)
        self._highest = highest
        self._busy = False
        self._order = 0
        self._weights_before = False

    def run(self) -> None:
        """Makes the passes and collects the findings."""
        batch, found = self.batch, self.found
        run = whole_model.sixteen_bit(
            batch, found, self._sixteen, self.limits.name
        )
        truth = None
        if batch.loss is not None:
            truth = whole_model.truth(
                batch, found, self._reference, run.signatures
            )
        scale = loss.scale(run, truth, self.limits, (self._highest, FLOOR))
        self._judge_all(
            one_layer.Judge(self._sixteen, run, truth, self.limits, scale)
        )
        while self.judge.scale > FLOOR and self._overflows_backward():
            lower = max(self.judge.scale / _STEP_DOWN, FLOOR)
            self._judge_all(dataclasses.replace(self.judge, scale=lower))
        if batch.loss is not None and self._overflows_backward():
            self.findings = loss.blamed(self.findings, self.limits)
        traced = _traced_back(self.findings)
        self.findings = _worst(_attributed(traced, found))

    def _judge_all(self, judge: one_layer.Judge) -> None:
        self.judge = judge
        self.findings = []
        self._order = 0
        self._weights_before = False
        with (
            layers.policies(self._reference),
            layers.autocast("float32"),
            probe.watched(self.found, self._call),
        ):
            outputs, _ = self.batch.run(self.batch.weights())
        self.findings += weights.findings(
            self.found, self._sixteen, self.limits
        )
        if self.batch.loss is not None:
            self._order += 1
            self.findings += loss.findings(
                self.batch, outputs, judge, self._order
            )
            self._add_tight(
                verdicts.LOSS,
                [self.findings[-1].gap],
                judge.run.output_dtypes,
            )

    def _overflows_backward(self) -> bool:
        """Says whether dynamic loss scaling would go on to a lower scale."""
        bad_forward = {
            finding.layer
            for finding in self.findings
            if finding.phase != verdicts.BACKWARD
            and finding.verdict != verdicts.OK
        }
        return any(
            finding.gap.lost
            and finding.phase == verdicts.BACKWARD
            and finding.layer not in bad_forward
            for finding in self.findings
        )

    def _call(self, call: probe.Call) -> Any:
        if self._busy:
            return call.proceed()
        has_weights = any(
            layer.trainable_variables for layer in call.target.layers
        )
        reaches_weights = self._weights_before
        outputs = call.proceed()
        self._weights_before |= has_weights
        if call.key not in self.judge.run.signatures:
            return outputs
        self._busy = True
        try:
            self._order += 1
            self._judge(call, reaches_weights, has_weights or reaches_weights)
        finally:
            self._busy = False
        return outputs

    def _judge(
        self, call: probe.Call, reaches_weights: bool, useful: bool
    ) -> None:
        name, order = call.target.name, self._order
        gaps = self.judge.call(call)
        forward = verdicts.forward(name, order, gaps, self.limits)
        self.findings.append(forward)
        if useful:
            backward = verdicts.backward(
                name, order, gaps, self.limits, reaches_weights
            )
            self.findings += [backward] if backward else []
            self._add_tight(
                name,
                [gaps.weights, gaps.inputs if reaches_weights else None],
                self._dtypes(call),
            )
        if forward.verdict != verdicts.OK:
            return
        self._add_latent(call, gaps.outputs)

    def _dtypes(self, call: probe.Call) -> list[str]:
        signature = self.judge.run.signatures[call.key]
        planned = [
            trial_policies.dtype(self._sixteen, one)
            for one in call.target.layers
        ]
        return [*planned, *signature.arguments]

    def _add_tight(
        self,
        name: str,
        gaps: Sequence[compare.Gap | None],
        dtypes: Sequence[str],
    ) -> None:
        if self.judge.truth is None or self.judge.scale > FLOOR:
            return
        tight = room.finding(name, self._order, gaps, dtypes)
        self.findings += [tight] if tight else []

    def _add_latent(self, call: probe.Call, gap: compare.Gap) -> None:
        name, order = call.target.name, self._order
        signature = self.judge.run.signatures[call.key]
        if signature.is_output:
            exact = self.judge.exact(call, call.tensors)
            head = heads.finding(
                name,
                order,
                gap,
                signature,
                heads.probabilities(call.target.operation, exact),
            )
            self.findings += [head] if head else []
        constants = epsilons.vanishing(call.target.operation, self.limits)
        if constants and epsilons.shows(self.judge, call):
            self.findings.append(
                verdicts.Finding(
                    name,
                    verdicts.FORWARD,
                    verdicts.UNDERFLOW,
                    gap,
                    order,
                    latent=True,
                    note=f"its {constants[0]:g} is 0 in {self.limits.name}",
                )
            )


def _attributed(
    findings: Sequence[verdicts.Finding], found: Sequence[probe.Target]
) -> list[verdicts.Finding]:
    """Clears a layer of the faults of the layers inside it."""
    inside = {target.name: target.inside for target in found}
    guilty = {
        (outer, finding.phase)
        for finding in findings
        if finding.verdict != verdicts.OK and not finding.given
        for outer in inside.get(finding.layer, ())
    }
    return [
        dataclasses.replace(finding, verdict=verdicts.OK)
        if (finding.layer, finding.phase) in guilty
        else finding
        for finding in findings
    ]


def _traced_back(
    findings: Sequence[verdicts.Finding],
) -> list[verdicts.Finding]:
    """Blames gradients that underflow on the layer that made them small.

    The digits go little by little on the way from there, and what is left
    crosses the tolerance some layers later.
    """
    result = list(findings)
    for index, victim in enumerate(findings):
        if victim.phase != verdicts.BACKWARD or not victim.was_low:
            continue
        if victim.verdict != verdicts.UNDERFLOW:
            continue
        result[index] = dataclasses.replace(victim, given=True)
        makers = [
            (finding.order, position)
            for position, finding in enumerate(findings)
            if finding.opens_underflow and finding.order > victim.order
        ]
        if makers:
            position = min(makers)[1]
            result[position] = dataclasses.replace(
                findings[position], verdict=verdicts.UNDERFLOW
            )
    return result


def _worst(findings: Sequence[verdicts.Finding]) -> list[verdicts.Finding]:
    """Keeps one finding per layer and phase, for layers called often."""
    worst: dict[tuple[str, str], verdicts.Finding] = {}
    for finding in sorted(findings, key=lambda one: one.rank):
        worst.setdefault((finding.layer, finding.phase), finding)
    return list(worst.values())
