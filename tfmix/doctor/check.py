"""The doctor: a model in 16 bit against itself in float32, layer by layer."""

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import keras
from absl import logging

from tfmix import _formats
from tfmix._keras import compilation, layers
from tfmix.conversion import trial_policies
from tfmix.doctor import batch as batches
from tfmix.doctor import (
    gaps,
    latent,
    loss,
    numerics_report,
    one_layer,
    probe,
    remedies,
    verdicts,
    whole_model,
)
from tfmix.policy import policy as policies
from tfmix.policy.in_force import carried as carrying
from tfmix.policy.in_force import penalties, scope, suited_optimizer, switch

# More rows would cost memory and tell nothing new.
ROWS = 64
# Where dynamic loss scaling starts, its rule's default, and its lowest.
_LOSS_SCALE, _LOWEST = 2.0**15, 1.0
# Factor between two scales that are tried when gradients overflow.
_STEP_DOWN = 16.0
_BAD_ROWS_SHOWN = 10


def check(
    model: keras.Model,
    x: Any,
    y: Any = None,
    *,
    loss: Any = None,
    policy: str | keras.DTypePolicy | None = None,
) -> numerics_report.NumericsReport:
    """Runs a model in 16 bit and in float32 and names the layers that fail.

    Call it before a long run, or after one went wrong. Each layer is judged
    by itself, on the inputs and gradients it has in float32: a fault is found
    where it arises, not where it shows. The model, its weights, statistics,
    random seeds and compiled functions stay as they are. It runs op by op on
    the device and copies a few numbers per layer to the host.

    Args:
        model: A `keras.Model` of any kind, on Keras's TensorFlow or JAX
            backend. It is built if it is not.
        x: One batch of inputs: an array, a nest of arrays, or a
            `tf.data.Dataset`, of which the first batch is taken. Use real
            rows; 16 to 64 are enough, and no more than 64 are checked.
        y: The targets. Defaults to `None`: only the forward pass is checked,
            unless `x` is a dataset that holds them.
        loss: As for `compile`, or a function of `(y, outputs)`, which is
            called on the outputs as they are. Defaults to the loss that the
            model was compiled with.
        policy: A name, a `tfmix.Policy` or a `keras.DTypePolicy`. Defaults to
            the dtypes that the model has, and to `"mixed_float16"` for a
            float32 model. A name leaves a model that is in that 16-bit
            format as it is.

    Returns:
        A `NumericsReport`: `healthy`, and `rows` with the most severe first.

    Raises:
        TypeError: If `model` is no Keras model, or `policy` no policy.
        ValueError: If `y` comes without a loss or a loss without `y`, or if
            `policy` computes in float32.

    Example:
        >>> import numpy as np
        >>> layers = [keras.layers.ReLU(), keras.layers.Dense(1)]
        >>> model = keras.Sequential([keras.Input((2,)), *layers])
        >>> check(model, np.array([[1e5, 1.0]])).rows[0].verdict
        'overflow'
    """
    return checked(model, x, y, loss=loss, policy=policy, rows=ROWS)


def checked(
    model: keras.Model,
    x: Any,
    y: Any,
    *,
    loss: Any,
    policy: str | keras.DTypePolicy | None,
    rows: int | None,
) -> numerics_report.NumericsReport:
    """Does what `check` does, on as many rows as are asked for."""
    batch = batches.prepare(model, x, y, loss, rows)
    chosen, base = _policy(model, policy)
    # A policy that is tried out comes with loss scaling; what stands may not.
    warning = ""
    if chosen is None:
        warning = suited_optimizer.missing_scaler_warning(model)
        if warning:
            logging.warning("tfmix: %s", warning)
    return _run(batch, chosen, base, warning)


def _run(
    given: batches.Batch,
    chosen: keras.DTypePolicy | None,
    base: policies.Policy,
    warning: str = "",
) -> numerics_report.NumericsReport:
    """Checks a batch; a warning says that the loss is not scaled."""
    limits = _formats.limits(base.compute_dtype)
    sixteen = trial_policies.sixteen_bit(given.model, chosen)
    bad_rows = given.bad_rows()
    batch = given.without({row for rows in bad_rows.values() for row in rows})
    bad_data = [_bad_data(*one) for one in bad_rows.items()]
    with contextlib.ExitStack() as stack:
        stack.enter_context(compilation.nothing_traced())
        stack.enter_context(carrying.outputs_as_made())
        if isinstance(chosen, policies.Policy):
            stack.enter_context(
                switch.block({*chosen.float32_ops, penalties.RULE})
            )
        found = probe.targets(batch.model)
        highest = _LOWEST if warning else _LOSS_SCALE
        visit = _Visit(batch, found, sixteen, limits, highest)
        visit.run()
    findings = visit.findings
    if bad_data:
        # Where no row is fine, all that is not finite is so because of them.
        findings = [
            dataclasses.replace(one, verdict=verdicts.OK)
            if one.gap.broken
            else one
            for one in findings
        ]
    return numerics_report.NumericsReport(
        rows=(*bad_data, *_rows(findings, found, limits, bool(warning))),
        policy=base,
        loss_scale=visit.judge.scale,
        again=lambda other: _run(given, other, other),
        targets={target.name: target for target in found},
        sixteen_bit_layers=sum(
            trial_policies.dtype(sixteen, layer) in _formats.SIXTEEN_BIT
            for layer in suited_optimizer.computing_layers(batch.model)
        ),
        notes=tuple(one for one in (warning, *batch.notes) if one),
    )


def _policy(
    model: Any, policy: str | keras.DTypePolicy | None
) -> tuple[keras.DTypePolicy | None, policies.Policy]:
    """Returns what to plan with, None for as it stands, and its rules."""
    now = {
        layer.compute_dtype
        for layer in trial_policies.sixteen_bit_layers(model)
    }
    if policy is None:
        carried = carrying.carried_policy(model)
        name = f"mixed_{min(now)}" if now else "mixed_float16"
        base = policies.with_rules(carried or keras.DTypePolicy(name))
        return (None if now else base), base
    accepted = scope.accept(policy)
    if accepted.compute_dtype not in _formats.SIXTEEN_BIT:
        raise ValueError(
            "`policy` must compute in 16 bit, such as 'mixed_float16': "
            "float32 is what it is checked against. "
            f"Received: policy={policy!r}."
        )
    if isinstance(policy, str) and now == {accepted.compute_dtype}:
        return None, policies.with_rules(accepted)
    if isinstance(accepted, policies.Policy):
        return accepted, accepted
    bare = policies.Policy(
        f"mixed_{accepted.compute_dtype}", float32_layers=[], float32_ops=[]
    )
    return accepted, bare


def _rows(
    findings: list[verdicts.Finding],
    found: list[probe.Target],
    limits: _formats.Format,
    unscaled: bool,
) -> list[verdicts.LayerVerdict]:
    classes = {target.name: type(target.operation).__name__ for target in found}
    result = []
    for finding in sorted(findings, key=lambda one: one.rank):
        gap, backward = finding.gap, finding.phase == verdicts.BACKWARD
        name = classes.get(finding.layer, "Layer")
        result.append(
            verdicts.LayerVerdict(
                layer=finding.layer,
                phase=finding.phase,
                verdict=finding.verdict,
                relative_error=math.inf if gap.broken else gap.relative_error,
                headroom_bits=gap.headroom_bits,
                advice=remedies.line(finding, name, limits, unscaled),
                gradient_cosine=float(gap.cosine) if backward else None,
                broken=gap.broken and finding.verdict != verdicts.OK,
            )
        )
    return result


def _bad_data(name: str, rows: Sequence[int]) -> verdicts.LayerVerdict:
    """Returns the row of the report for `x` or `y` with NaN or infinity."""
    shown = ", ".join(map(str, rows[:_BAD_ROWS_SHOWN]))
    more = ", ..." if len(rows) > _BAD_ROWS_SHOWN else ""
    return verdicts.LayerVerdict(
        layer=name,
        phase=verdicts.FORWARD,
        verdict=verdicts.NOT_FINITE,
        relative_error=math.inf,
        headroom_bits=-math.inf,
        advice=f"numpy.isfinite({name})  # {name} holds NaN or infinity in "
        f"rows {shown}{more}: mend that first",
        broken=True,
    )


class _Visit:
    """The passes of one check, and what each layer was found to do."""

    def __init__(
        self,
        batch: batches.Batch,
        found: Sequence[probe.Target],
        sixteen: trial_policies.Plan,
        limits: _formats.Format,
        highest: float,
    ) -> None:
        self.batch = batch
        self.found = found
        self.limits = limits
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
        scale = loss.scale(run, truth, self.limits, (self._highest, _LOWEST))
        self._judge_all(
            one_layer.Judge(self._sixteen, run, truth, self.limits, scale)
        )
        while self.judge.scale > _LOWEST and self._overflows_backward():
            lower = max(self.judge.scale / _STEP_DOWN, _LOWEST)
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
        self.findings += latent.weights(self.found, self._sixteen, self.limits)
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
        found = self.judge.call(call)
        forward = verdicts.forward(name, order, found, self.limits)
        self.findings.append(forward)
        if useful:
            backward = verdicts.backward(
                name, order, found, self.limits, reaches_weights
            )
            self.findings += [backward] if backward else []
            planned = [
                trial_policies.dtype(self._sixteen, one)
                for one in call.target.layers
            ]
            arguments = self.judge.run.signatures[call.key].arguments
            self._add_tight(
                name,
                [found.weights, found.inputs if reaches_weights else None],
                [*planned, *arguments],
            )
        if forward.verdict == verdicts.OK:
            self._add_latent(call, found.outputs)

    def _add_tight(
        self,
        name: str,
        found: Sequence[gaps.Gap | None],
        dtypes: Sequence[str],
    ) -> None:
        if self.judge.truth is None or self.judge.scale > _LOWEST:
            return
        tight = latent.no_room(name, self._order, found, dtypes)
        self.findings += [tight] if tight else []

    def _add_latent(self, call: probe.Call, gap: gaps.Gap) -> None:
        for look in (latent.probabilities, latent.vanishing_constant):
            finding = look(self.judge, call, self._order, gap)
            self.findings += [finding] if finding else []


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

    Each layer behind it loses a few more digits, so that the error crosses
    the tolerance only some layers later.
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
