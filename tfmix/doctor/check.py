"""The doctor: a model in 16 bit against itself in float32, layer by layer."""

import contextlib
import math
from typing import Any

import keras
from absl import logging

from tfmix import _formats
from tfmix._keras import layers
from tfmix.conversion import trial_policies
from tfmix.doctor import batch as batches
from tfmix.doctor import (
    missing_scaler,
    numerics_report,
    probe,
    remedies,
    rows,
    verdicts,
    visit,
)
from tfmix.policy import policy as policies
from tfmix.policy.in_force import carried as carrying
from tfmix.policy.in_force import penalties, scope, switch


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
        x: One batch of inputs: an array, or a nest of arrays. 16 to 64 rows
            are enough; use real ones.
        y: The targets. Defaults to `None`: only the forward pass is checked.
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
    batch = batches.prepare(model, x, y, loss)
    chosen, base = _policy(model, policy)
    # A policy that is tried out comes with loss scaling; what stands may not.
    note = missing_scaler.warning(model) if chosen is None else ""
    if note:
        logging.warning("tfmix: %s", note)
    return _run(batch, chosen, base, note)


def _run(
    batch: batches.Batch,
    chosen: keras.DTypePolicy | None,
    base: policies.Policy,
    note: str = "",
) -> numerics_report.NumericsReport:
    limits = _formats.limits(base.compute_dtype)
    sixteen = trial_policies.sixteen_bit(batch.model, chosen)
    with contextlib.ExitStack() as stack:
        stack.enter_context(layers.nothing_traced())
        if isinstance(chosen, policies.Policy):
            stack.enter_context(
                switch.block({*chosen.float32_ops, penalties.RULE})
            )
        found = probe.targets(batch.model)
        highest = visit.FLOOR if note else visit.LOSS_SCALE
        seen = visit.Visit(batch, found, sixteen, limits, highest)
        seen.run()
    found_rows = [
        _row(finding, seen.classes, limits, note)
        for finding in sorted(seen.findings, key=lambda one: one.rank)
    ]
    return numerics_report.NumericsReport(
        rows=tuple(found_rows),
        policy=base,
        loss_scale=seen.judge.scale,
        again=lambda other: _run(batch, other, other),
        targets={target.name: target for target in found},
        notes=(note,) if note else (),
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


def _row(
    finding: verdicts.Finding,
    classes: dict[str, str],
    limits: _formats.Format,
    note: str,
) -> rows.Row:
    gap = finding.gap
    line = remedies.line(finding, classes.get(finding.layer, "Layer"), limits)
    if note and remedies.mended_by_scaling(finding):
        line = remedies.scaled(line)
    return rows.Row(
        layer=finding.layer,
        phase=finding.phase,
        verdict=finding.verdict,
        relative_error=math.inf if gap.broken else gap.relative_error,
        headroom_bits=gap.headroom_bits,
        advice=line,
        gradient_cosine=(
            float(gap.cosine) if finding.phase == verdicts.BACKWARD else None
        ),
    )
