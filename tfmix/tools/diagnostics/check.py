"""`check` compares a model in 16 bit with float32, layer by layer."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np
from keras import ops

from tfmix import _bad_rows, _formats, _progress
from tfmix._keras import (
    graphs,
    layers,
    optimizers,
    replacing,
    training,
)
from tfmix.autocast import global_policy, layer_calls
from tfmix.autocast import record as mixed_model
from tfmix.float8 import chosen_layers
from tfmix.gradient_scaling import model_call
from tfmix.loss_scaling import optimizer as scaling
from tfmix.loss_scaling import rules
from tfmix.policy import policy as policies
from tfmix.tools.diagnostics import batch as batches
from tfmix.tools.diagnostics import (
    dtype_notes,
    numerics_report,
    passes,
    plans,
    probe,
    runs,
    verdicts,
)

# More rows would cost memory and show nothing new.
ROWS = 64
_FLOAT16 = _formats.FLOAT16
_IDLE = "No layer computes in 16 bit, so there was nothing to compare."


def check(
    model: keras.Model,
    x: Any,
    y: Any = None,
    *,
    loss: Any = None,
    policy: str | keras.DTypePolicy | None = None,
    verbose: bool = False,
) -> numerics_report.NumericsReport:
    """Runs a model in 16 bit and in float32, and names the layers that fail.

    Call it before a long run, or after one that went wrong. Each layer is
    judged by itself, on the inputs and gradients that it has in float32. So
    the report names the layer that causes a fault, not those that pass it on.
    The model, its weights, statistics, random seeds and compiled functions do
    not change. The layers run on the device, one by one, and their results are
    compared on the host.

    Args:
        model: A `keras.Model` of any kind, on Keras's TensorFlow or JAX
            backend. It is built if necessary.
        x: One batch of inputs: an array, a nest of arrays, or a
            `tf.data.Dataset`, whose first batch is used. Use real rows; 16
            to 64 are enough, and at most 64 are checked.
        y: The targets. Defaults to `None`: only the forward pass is checked,
            unless `x` is a dataset that contains them.
        loss: As for `compile`, or a function of `(y, outputs)`, which gets
            the outputs unchanged. Defaults to the loss that the model was
            compiled with.
        policy: A name, a `tfmix.Policy` or a `keras.DTypePolicy`. Defaults to
            the model's dtypes, and to `"mixed_float16"` for a float32 model.
            If you pass a name, and the model computes in that 16-bit format
            already, its dtypes are checked.
        verbose: Boolean, whether the report prints all its rows and advice.
            Defaults to `False`: faulty layers and those with the least
            headroom, one screen at most.

    Returns:
        A `NumericsReport`: `healthy`, and `rows` with the most severe first.

    Raises:
        TypeError: If `model` is not a Keras model, or `policy` not a policy.
        ValueError: If `y` comes without a loss or a loss without `y`, or if
            `policy` computes in float32.

    Examples:
        >>> import numpy as np
        >>> layers = [keras.layers.ReLU(), keras.layers.Dense(1)]
        >>> model = keras.Sequential([keras.Input((2,)), *layers])
        >>> check(model, np.array([[1e5, 1.0]])).rows[0].verdict
        'overflow'
    """
    batch = batches.prepare(model, x, y, loss, ROWS)
    chosen, base = _policy(model, policy)
    with _progress.shown(f"Checking {model.name} in {base.compute_dtype}"):
        report = _run(batch, chosen, base)
    return dataclasses.replace(report, verbose=verbose)


def sampled(
    model: keras.Model, x: Any, y: Any
) -> numerics_report.NumericsReport:
    """Checks a whole batch of `fit`, and says nothing.

    Raises:
        ValueError: If no layer computes in 16 bit, or the batch does not fit.
    """
    if not plans.sixteen_bit_layers(model):
        raise ValueError(_IDLE)
    has_loss = training.compiled_loss(model) is not None
    batch = batches.prepare(model, x, y if has_loss else None, None, None)
    _, base = _policy(model, None)
    return _run(batch, None, base)


def _run(
    original: batches.Batch,
    chosen: keras.DTypePolicy | None,
    base: policies.Policy,
) -> numerics_report.NumericsReport:
    limits = _formats.LIMITS[base.compute_dtype]
    sixteen = plans.sixteen_bit(original.model, chosen)
    bad_rows = original.bad_rows()
    batch = original.without({row for bad in bad_rows for row in bad.rows})
    with _under_policy(chosen, batch.model, sixteen):
        rule: rules.LossScale = rules.NoLossScale()
        if batch.loss is not None and limits is _FLOAT16:
            rule = _rule(batch.model, chosen)
        own_policy = mixed_model.policy_of(batch.model)
        # A model under test counts as created, or converted, under the policy.
        has_policy = chosen is not None or own_policy is not None
        findings, judge = passes.find(batch, sixteen, limits, rule, has_policy)
        ends = dtype_notes.last_activations(batch.model, sixteen)
    bad = [*map(_bad_data, bad_rows), *_bad_weights(batch.model)]
    if bad:
        # If no row is fine, bad rows explain everything that is not finite.
        findings = [finding for finding in findings if not finding.gap.broken]
    dtypes = _returned_dtypes(judge)
    model = batch.model
    narrow = [
        layer
        for layer in layers.that_compute(model)
        if plans.dtype(judge.run.planned, layer) in _formats.SIXTEEN_BIT
    ]
    idle = [] if narrow else [_IDLE]
    return numerics_report.NumericsReport(
        rows=(
            *bad,
            *_rows(findings, judge.targets, dtypes, limits, rule),
        ),
        policy=base,
        model_name=original.model.name,
        loss_scale=judge.loss_scale,
        again=lambda other: _run(original, other, other),
        targets={target.name: target for target in judge.targets},
        sixteen_bit_layers=len(narrow),
        notes=(
            *filter(None, [_scale_note(judge.loss_scale, rule)]),
            *idle,
            *judge.run.fallbacks,
            *ends,
            *batch.notes,
        ),
    )


def _rule(
    model: keras.Model, chosen: keras.DTypePolicy | None
) -> rules.LossScale:
    """Returns the rule of the loss scale with which the model trains."""
    optimizer = getattr(model, "optimizer", None)
    is_its = chosen is None or not getattr(optimizer, "is_automatic", False)
    if is_its and isinstance(optimizer, scaling.LossScaleOptimizer):
        return optimizer.rule
    # A model under test, or with a policy of ours, gets one. Under a policy of
    # Keras's own, `compile(auto_scale_loss=False)` leaves it out.
    is_scaled = isinstance(optimizer, optimizers.KerasScaler) or getattr(
        optimizer, "loss_scale_factor", None
    )
    has_policy = chosen is not None or mixed_model.policy_of(model) is not None
    if optimizer is not None and not (has_policy or is_scaled):
        return rules.NoLossScale()
    return rules.DynamicLossScale()


def _scale_note(scale: float, rule: rules.LossScale) -> str:
    """Returns the line that makes `fit` begin at a scale, "" if it does."""
    first = float(rule.init()[0])
    if scale == first:
        return ""
    return (
        f"Gradients fit float16 at a loss scale of {scale:g}, but `fit` begins "
        f"at {first:g}. After `compile`, write "
        f"`model.optimizer.loss_scale = {scale!r}`."
    )


def _returned_dtypes(judge: runs.Judge) -> dict[str, str]:
    """Returns each layer's output dtype in the 16-bit run, by name."""
    dtypes = {
        judge.targets[index].name: signature.outputs[0]
        for (index, _), signature in judge.run.signatures.items()
        if signature.outputs
    }
    outputs = {"float32"} if judge.has_policy else {*judge.run.output_dtypes}
    return {**dtypes, verdicts.LOSS: ", ".join(outputs)}


@contextlib.contextmanager
def _under_policy(
    chosen: keras.DTypePolicy | None,
    model: keras.Model,
    sixteen: plans.Plan,
) -> Iterator[None]:
    """Makes a model compute under a policy; `None` keeps its own setup."""
    with contextlib.ExitStack() as conditions:
        conditions.enter_context(nothing_traced())
        conditions.enter_context(model_call.outputs_as_made())
        if isinstance(chosen, policies.Policy):
            names = {*chosen.float32_ops, policies.SIXTEEN_BIT}
            conditions.enter_context(replacing.block(names))
        if chosen is not None:
            conditions.enter_context(layer_calls.fresh(model))
            before = chosen_layers.reasons(model)
            conditions.callback(chosen_layers.restore, model, before)
            chosen_layers.restore(model, {})
            rules = policies.with_rules(chosen)
            if rules.is_float8:
                with graphs.policies(sixteen):
                    chosen_layers.choose(model, rules)
        yield


def _policy(
    model: Any, policy: str | keras.DTypePolicy | None
) -> tuple[keras.DTypePolicy | None, policies.Policy]:
    """Returns the policy to plan with, None for the model's, and its rules."""
    sixteen = plans.sixteen_bit_layers(model)
    now = {layer.compute_dtype for layer in sixteen}
    if policy is None:
        own_policy = mixed_model.policy_of(model)
        name = f"mixed_{min(now)}" if now else "mixed_float16"
        base = policies.with_rules(own_policy or keras.DTypePolicy(name))
        return (None if now else base), base
    accepted = global_policy.accept(policy)
    if accepted.compute_dtype not in _formats.SIXTEEN_BIT:
        raise ValueError(
            "`policy` must compute in 16 bit, such as 'mixed_float16': "
            "it is compared with float32. "
            f"Received: policy={policy!r}."
        )
    if isinstance(policy, str) and now == {accepted.compute_dtype}:
        return None, policies.with_rules(accepted)
    return accepted, policies.with_rules(accepted)


def _rows(
    findings: list[verdicts.Finding],
    targets: list[probe.Target],
    dtypes: Mapping[str, str],
    limits: _formats.Format,
    rule: rules.LossScale,
) -> list[verdicts.LayerVerdict]:
    unscaled = limits is _FLOAT16 and isinstance(rule, rules.NoLossScale)
    classes = {
        target.name: type(target.operation).__name__ for target in targets
    }
    result = []
    for finding in sorted(findings, key=lambda finding: finding.rank):
        gap, name = finding.gap, classes.get(finding.layer, "Layer")
        advice = verdicts.advice(finding, name, limits, unscaled)
        result.append(
            verdicts.LayerVerdict(
                finding.layer,
                finding.phase,
                finding.verdict,
                math.inf if gap.broken else gap.relative_error,
                gap.headroom_bits,
                advice,
                gap.broken and finding.verdict != verdicts.OK,
                dtypes.get(finding.layer, ""),
                verdicts.bound(finding, limits),
            )
        )
    return result


def _bad_data(bad: _bad_rows.BadRows) -> verdicts.LayerVerdict:
    """Returns the report's row for `x` or `y` with NaN or infinity."""
    positions = f"numpy.argwhere(~numpy.isfinite({bad.name}))"
    advice = f"{positions}  # {bad.text}: fix that first"
    return _broken(bad.name, verdicts.FORWARD, advice)


def _bad_weights(model: keras.Model) -> list[verdicts.LayerVerdict]:
    """Returns a row for each variable, trained or not, with NaN or infinity."""
    result = []
    # Inner layers come after outer ones, so a variable's innermost layer wins.
    every = layers.flat_layers(model)
    owners = {id(v): layer.name for layer in every for v in layer.variables}
    for variable in model.variables:
        if keras.backend.is_float_dtype(variable.dtype):
            values = ops.convert_to_numpy(variable.value)
            count = values.size - np.count_nonzero(np.isfinite(values))
            if count:
                advice = (
                    f"# its {variable.name} is NaN or infinite in {count:,} of "
                    f"{values.size:,} entries: initialise it again, or load "
                    "an earlier checkpoint"
                )
                layer = owners.get(id(variable), variable.path)
                result.append(_broken(layer, verdicts.WEIGHTS, advice))
    return result


def _broken(layer: str, phase: str, advice: str) -> verdicts.LayerVerdict:
    """Returns the row of something that is not finite in float32 either."""
    verdict = verdicts.NOT_FINITE
    return verdicts.LayerVerdict(
        layer, phase, verdict, math.inf, -math.inf, advice, broken=True
    )


@contextlib.contextmanager
def nothing_traced() -> Iterator[None]:
    """Runs `tf.function`s op by op in a block, in all threads."""
    if keras.backend.backend() != "tensorflow":
        yield
        return
    import tensorflow as tf

    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)
