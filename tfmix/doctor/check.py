"""The doctor: a model in 16 bit against itself in float32, layer by layer."""

import contextlib
import dataclasses
import functools
import itertools
import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from tfmix import _formats, _messages, _progress
from tfmix._keras import compilation, layers
from tfmix.conversion import planned_policies
from tfmix.doctor import batch as batches
from tfmix.doctor import (
    differentiation,
    float8_products,
    latent,
    missing_scaler,
    numerics_report,
    probe,
    ranges,
    runs,
    verdicts,
)
from tfmix.float8 import chosen_layers
from tfmix.in_force.global_policy import current_policy
from tfmix.in_force.layer import fallback
from tfmix.in_force.model import carried as carrying
from tfmix.in_force.model import computing_layers, model_outputs
from tfmix.in_force.process_wide import active_rules
from tfmix.in_force.process_wide import ops as op_rules_in_force
from tfmix.policy import policy as policies
from tfmix.scaling import rules

# More rows would cost memory and tell nothing new.
ROWS = 64
# Where dynamic loss scaling starts, its rule's default.
_LOSS_SCALE = rules.DynamicLossScale().initial_scale
# What scales gradients inside a model knows no lowest; this is beyond use.
_LOWEST_INSIDE = 2.0**-40
_IDLE = "No layer computes in 16 bit, so there was nothing to compare."
_QUANTIZED = (
    "Quantized layers keep their dtypes. For 16 bit around the integers make "
    "the model under 'mixed_bfloat16' and quantize it then."
)


def check(
    model: keras.Model,
    x: Any,
    y: Any = None,
    *,
    loss: Any = None,
    policy: str | keras.DTypePolicy | None = None,
    verbose: bool = False,
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
        verbose: Boolean, whether the report prints all its rows and advice.
            Defaults to `False`: what is at fault and what is nearest to it,
            a screen at most.

    Returns:
        A `NumericsReport`: `healthy`, and `rows` with the most severe first.

    Raises:
        TypeError: If `model` is no Keras model, or `policy` no policy.
        ValueError: If `y` comes without a loss or a loss without `y`, or if
            `policy` computes in float32.

    Examples:
        >>> import numpy as np
        >>> layers = [keras.layers.ReLU(), keras.layers.Dense(1)]
        >>> model = keras.Sequential([keras.Input((2,)), *layers])
        >>> check(model, np.array([[1e5, 1.0]])).rows[0].verdict
        'overflow'
    """
    report = checked(model, x, y, loss=loss, policy=policy, rows=ROWS)
    return dataclasses.replace(report, verbose=verbose)


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
    what = f"Checking {model.name} in {base.compute_dtype}"
    # A policy that is tried out comes with loss scaling; what stands may not.
    warning = ""
    if chosen is None:
        warning = missing_scaler.warning(model)
        if warning:
            _messages.warn("%s", warning)
    with _progress.shown(what) as say:
        return _run(batch, chosen, base, warning, functools.partial(say, what))


def _run(
    given: batches.Batch,
    chosen: keras.DTypePolicy | None,
    base: policies.Policy,
    warning: str = "",
    show: Callable[[float], None] = lambda share: None,
) -> numerics_report.NumericsReport:
    """Checks a batch; a warning says that the loss is not scaled."""
    limits = _formats.limits(base.compute_dtype)
    sixteen = planned_policies.sixteen_bit(given.model, chosen)
    bad_rows = given.bad_rows()
    batch = given.without({row for rows in bad_rows.values() for row in rows})
    with _as_under(chosen, batch.model, sixteen):
        found = probe.targets(batch.model)
        highest = latent.LOWEST_SCALE if warning else _LOSS_SCALE
        carried = carrying.carried_policy(batch.model)
        carries = chosen is None and carried is not None
        visit = _Visit(batch, found, sixteen, limits, highest, carries, show)
        findings = visit.run()
        float8 = _float8(batch)
    bad = [*itertools.starmap(_bad_data, bad_rows.items())]
    bad += _bad_weights(batch.model)
    if bad:
        # Where no row is fine, all that is not finite is so because of them.
        findings = [one for one in findings if not one.gap.broken]
    narrow = _narrow_layers(batch.model, visit.sixteen)
    idle = () if narrow else (_IDLE, *_why_idle(batch.model))
    return numerics_report.NumericsReport(
        rows=(
            *bad,
            *_rows(findings, found, visit.dtypes(), limits, bool(warning)),
        ),
        policy=base,
        model_name=given.model.name,
        loss_scale=visit.judge.scale,
        again=lambda other: _run(given, other, other),
        targets={target.name: target for target in found},
        sixteen_bit_layers=len(narrow),
        float8=float8,
        notes=(
            *filter(None, [warning]),
            *idle,
            *visit.judge.run.fallen,
            *batch.notes,
        ),
    )


def _narrow_layers(
    model: keras.Model, sixteen: planned_policies.Plan
) -> list[keras.Layer]:
    return [
        layer
        for layer in computing_layers.layers_that_compute(model)
        if planned_policies.dtype(sixteen, layer) in _formats.SIXTEEN_BIT
    ]


def _why_idle(model: keras.Model) -> list[str]:
    quantized = any(
        layer.quantization_mode for layer in layers.flat_layers(model)
    )
    return [_QUANTIZED] if quantized else []


def _float8(batch: batches.Batch) -> tuple[float8_products.Float8Product, ...]:
    """Measures what the chosen layers multiply in float8, in float32's run."""
    chosen = chosen_layers.chosen(batch.model)
    if batch.loss is None or not chosen:
        return ()
    reference = planned_policies.reference(batch.model)
    with layers.policies(reference), layers.autocast("float32"):
        found = float8_products.measure(
            chosen, lambda: batch.run(batch.weights())[1]
        )
    return tuple(float8_products.read(*found))


@contextlib.contextmanager
def _as_under(
    chosen: keras.DTypePolicy | None,
    model: keras.Model,
    sixteen: planned_policies.Plan,
) -> Iterator[None]:
    """Lets a model compute as under a policy, `None` for as it stands."""
    with contextlib.ExitStack() as conditions:
        conditions.enter_context(compilation.nothing_traced())
        conditions.enter_context(model_outputs.outputs_as_made())
        if isinstance(chosen, policies.Policy):
            names = {*chosen.float32_ops, op_rules_in_force.PENALTIES}
            conditions.enter_context(active_rules.block(names))
        if chosen is not None:
            conditions.enter_context(fallback.anew(model))
            before = chosen_layers.reasons(model)
            conditions.callback(chosen_layers.restore, model, before)
            chosen_layers.restore(model, {})
            rules = policies.with_rules(chosen)
            if rules.is_float8:
                with layers.policies(sixteen):
                    chosen_layers.choose(model, rules)
        yield


def _policy(
    model: Any, policy: str | keras.DTypePolicy | None
) -> tuple[keras.DTypePolicy | None, policies.Policy]:
    """Returns what to plan with, None for as it stands, and its rules."""
    sixteen = planned_policies.sixteen_bit_layers(model)
    now = {layer.compute_dtype for layer in sixteen}
    if policy is None:
        carried = carrying.carried_policy(model)
        name = f"mixed_{min(now)}" if now else "mixed_float16"
        base = policies.with_rules(carried or keras.DTypePolicy(name))
        return (None if now else base), base
    accepted = current_policy.accept(policy)
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
    dtypes: Mapping[str, str],
    limits: _formats.Format,
    unscaled: bool,
) -> list[verdicts.LayerVerdict]:
    classes = {target.name: type(target.operation).__name__ for target in found}
    result = []
    for one in sorted(findings, key=lambda one: one.rank):
        gap, name = one.gap, classes.get(one.layer, "Layer")
        is_float32 = dtypes.get(one.layer) == _formats.FLOAT32.name
        advice = verdicts.advice(one, name, limits, unscaled, is_float32)
        result.append(
            verdicts.LayerVerdict(
                one.layer,
                one.phase,
                one.verdict,
                math.inf if gap.broken else gap.relative_error,
                gap.headroom_bits,
                advice,
                float(gap.cosine) if one.phase == verdicts.BACKWARD else None,
                gap.broken and one.verdict != verdicts.OK,
                dtypes.get(one.layer, ""),
                verdicts.bound(one, limits),
                one.latent and one.verdict != verdicts.OK,
            )
        )
    return result


def _bad_data(name: str, rows: Sequence[int]) -> verdicts.LayerVerdict:
    """Returns the row of the report for `x` or `y` with NaN or infinity."""
    where = f"{name} holds NaN or infinity in {batches.shown(rows)}"
    positions = f"numpy.argwhere(~numpy.isfinite({name}))"
    advice = f"{positions}  # {where}: fix that first"
    phase, verdict = verdicts.FORWARD, verdicts.NOT_FINITE
    return verdicts.LayerVerdict(
        name, phase, verdict, math.inf, -math.inf, advice, broken=True
    )


def _bad_weights(model: keras.Model) -> list[verdicts.LayerVerdict]:
    """Returns a row for each variable, trained or not, with NaN or infinity."""
    phase, verdict, result = verdicts.WEIGHTS, verdicts.NOT_FINITE, []
    # Inner layers come after outer ones.
    found = layers.flat_layers(model)
    owners = {id(v): layer.name for layer in found for v in layer.variables}
    for variable in model.variables:
        if keras.backend.is_float_dtype(variable.dtype):
            values = ops.convert_to_numpy(variable.value)
            count = values.size - np.count_nonzero(np.isfinite(values))
            if count:
                advice = (
                    f"# its {variable.name} is NaN or infinite in {count:,} of "
                    f"{values.size:,} entries: set it anew, or load weights "
                    "of before"
                )
                layer = owners.get(id(variable), variable.path)
                one = (layer, phase, verdict, math.inf, -math.inf, advice)
                result.append(verdicts.LayerVerdict(*one, broken=True))
    return result


@dataclasses.dataclass(eq=False)
class _Visit:
    """The passes of one check, and what each layer was found to do."""

    batch: batches.Batch
    found: list[probe.Target]
    sixteen: planned_policies.Plan
    limits: _formats.Format
    # The loss scale to start with.
    highest: float
    # Whether the model as it stands carries a policy: it returns float32, and
    # scales its gradients inside.
    carries: bool
    # Is told the share of the layers that are judged.
    show: Callable[[float], None]
    findings: list[verdicts.Finding] = dataclasses.field(default_factory=list)

    def run(self) -> list[verdicts.Finding]:
        """Makes the passes and returns the findings."""
        batch, found, limits = self.batch, self.found, self.limits
        self._reference = planned_policies.reference(batch.model)
        run = runs.sixteen_bit(batch, found, self.sixteen, limits.name)
        self.sixteen = run.planned
        truth = None
        scale = 1.0
        if batch.loss is not None:
            truth = runs.truth(batch, found, self._reference, run.signatures)
            # bfloat16 has float32's range.
            if limits.name == _formats.FLOAT16.name:
                scale = _loss_scale(run, truth, self.lowest, self.highest)
        self._judge_all(
            runs.Judge(self.sixteen, run, truth, limits, scale, batch)
        )
        while self.judge.scale > self.lowest and self._overflows_backward():
            lower = max(self.judge.scale / 16.0, self.lowest)
            self._judge_all(dataclasses.replace(self.judge, scale=lower))
        if batch.loss is not None and self._overflows_backward():
            self.findings = _blamed(self.findings, limits)
        # One finding per layer and phase, for layers called often.
        worst: dict[tuple[str, str], verdicts.Finding] = {}
        findings = _attributed(_traced_back(self.findings), found)
        for one in sorted(findings, key=lambda one: one.rank):
            worst.setdefault((one.layer, one.phase), one)
        return list(worst.values())

    @property
    def lowest(self) -> float:
        """The lowest scale that gradients may have in 16 bit."""
        is_inside = self.carries and not (
            computing_layers.has_sixteen_bit_variables(self.batch.model)
        )
        return _LOWEST_INSIDE if is_inside else latent.LOWEST_SCALE

    def dtypes(self) -> dict[str, str]:
        """Returns what each layer handed on in the 16-bit run, by name."""
        run = self.judge.run
        found = {
            self.found[index].name: made.outputs[0]
            for (index, _), made in run.signatures.items()
            if made.outputs
        }
        given = {"float32"} if self.carries else {*run.output_dtypes}
        return {**found, verdicts.LOSS: ", ".join(given)}

    def _judge_all(self, judge: runs.Judge) -> None:
        self.judge = judge
        self.findings = []
        self._order = 0
        self._busy = self._weights_before = False
        with (
            layers.policies(self._reference),
            layers.autocast("float32"),
            probe.watched(self.found, self._call),
        ):
            outputs, _ = self.batch.run(self.batch.weights())
        self.findings += latent.weights(self.found, self.sixteen, self.limits)
        if self.batch.loss is not None:
            self._judge_loss(outputs)

    def _overflows_backward(self) -> bool:
        """Says whether dynamic loss scaling would go on to a lower scale."""
        backward = verdicts.BACKWARD
        bad_forward = {
            one.layer
            for one in self.findings
            if one.phase != backward and one.verdict != verdicts.OK
        }
        return any(
            one.gap.lost and one.phase == backward
            for one in self.findings
            if one.layer not in bad_forward
        )

    def _call(self, call: probe.Call) -> Any:
        if self._busy:
            return call.proceed()
        reaches_weights = self._weights_before
        signature = self.judge.run.signatures.get(call.key)
        # Judging computes the outputs of a layer with nothing inside, too.
        is_judged_alone = (
            signature and signature.is_tensor and call.target.whole
        )
        outputs = None if is_judged_alone else call.proceed()
        self._weights_before |= bool(call.target.weights)
        if signature is not None:
            self._busy = True
            try:
                self._order += 1
                truth = self._judge(call, reaches_weights)
                self.show(self._order / len(self.judge.run.signatures))
            finally:
                self._busy = False
        return truth[0] if is_judged_alone else outputs

    def _judge(self, call: probe.Call, reaches_weights: bool) -> list[Any]:
        """Adds what is found of a call; returns its outputs in float32."""
        name, order, limits = call.target.name, self._order, self.limits
        found, truth = self.judge.call(call)
        given = verdicts.of_output(found.arguments, limits) != verdicts.OK
        verdict = verdicts.of_output(found.outputs, limits)
        one = (name, verdicts.FORWARD, verdict, found.outputs, order, given)
        self._add(verdicts.Finding(*one))
        if reaches_weights or call.target.weights:
            self._add(
                verdicts.backward(name, order, found, limits, reaches_weights)
            )
            planned = [
                planned_policies.dtype(self.sixteen, one)
                for one in call.target.layers
            ]
            self._add_tight(
                name,
                [found.weights, found.inputs if reaches_weights else None],
                [*planned, *self.judge.run.signatures[call.key].arguments],
            )
        if verdict == verdicts.OK:
            for look in (latent.probabilities, latent.vanishing_constant):
                self._add(look(self.judge, call, order, found.outputs))
        return truth

    def _judge_loss(self, outputs: Any) -> None:
        """Judges the loss on the float32 outputs, forward and backward."""
        judge, limits = self.judge, self.limits
        dtypes = judge.run.output_dtypes
        exact = [ops.cast(leaf, "float32") for leaf in probe.floats(outputs)]
        near = [ops.cast(*pair) for pair in zip(exact, dtypes, strict=True)]

        def loss(leaves: list[Any]) -> list[Any]:
            if self.carries:
                leaves = [ops.cast(leaf, "float32") for leaf in leaves]
            # The loss of several outputs keeps a mean of each in variables.
            with keras.StatelessScope():
                return [self.batch.loss_of(leaves, outputs)]

        truth, truth_back = differentiation.pullback(loss, exact)
        found, found_back = differentiation.pullback(loss, near)
        forward = ranges.gap(found, truth, limits)
        right = truth_back([ops.ones_like(truth[0])])
        one = ops.ones_like(found[0])
        wrong = found_back([one * ops.cast(judge.scale, one.dtype)])
        backward = ranges.gap(wrong, right, limits, judge.scale)
        verdict, note = verdicts.of_output(forward, limits), ""
        dtype = probe.dtype(one)
        if verdict != verdicts.OK and dtype in _formats.SIXTEEN_BIT:
            note = f"the loss is computed in {dtype}"
        arguments = ranges.gap(near, exact, limits)
        given = verdicts.of_output(arguments, limits) != verdicts.OK
        is_own = isinstance(self.batch.loss, types.FunctionType)
        name, back = verdicts.LOSS, verdicts.of_gradient(backward, limits)
        self._order += 1
        order = self._order
        made = functools.partial(
            verdicts.Finding, order=order, given=given, is_own=is_own
        )
        self.findings += [
            made(name, verdicts.FORWARD, verdict, forward, note=note),
            made(name, verdicts.BACKWARD, back, backward),
        ]
        self._add_tight(name, [backward], dtypes)

    def _add_tight(
        self, name: str, found: list[ranges.Gap | None], dtypes: Sequence[str]
    ) -> None:
        if self.judge.truth is not None and self.judge.scale <= self.lowest:
            self._add(latent.no_room(name, self._order, found, dtypes))

    def _add(self, finding: verdicts.Finding | None) -> None:
        if finding is not None:
            self.findings.append(finding)


def _attributed(
    findings: list[verdicts.Finding], found: list[probe.Target]
) -> list[verdicts.Finding]:
    """Clears a layer of the faults of the layers inside it."""
    inside = {target.name: target.inside for target in found}
    cleared = {
        (outer, one.phase)
        for one in findings
        if one.verdict != verdicts.OK and not one.given
        for outer in inside.get(one.layer, ())
    }
    return [
        dataclasses.replace(one, verdict=verdicts.OK)
        if (one.layer, one.phase) in cleared
        else one
        for one in findings
    ]


def _traced_back(
    findings: Sequence[verdicts.Finding],
) -> list[verdicts.Finding]:
    """Blames gradients that underflow on the layer that made them small."""
    result = list(findings)
    for index, victim in enumerate(findings):
        if not victim.was_low or victim.verdict != verdicts.UNDERFLOW:
            continue
        result[index] = dataclasses.replace(victim, given=True)
        makers = [
            (one.order, place)
            for place, one in enumerate(findings)
            if one.opens_underflow and one.order > victim.order
        ]
        if makers:
            place = min(makers)[1]
            result[place] = dataclasses.replace(
                findings[place], verdict=verdicts.UNDERFLOW
            )
    return result


def _loss_scale(
    run: runs.SixteenBitRun, truth: runs.Truth, lowest: float, highest: float
) -> float:
    """Returns the power of two between two that scaling settles at."""
    sixteen = [
        tensor
        for key, tensors in truth.outputs.items()
        for tensor, dtype in zip(
            tensors, run.signatures[key].outputs, strict=True
        )
        if dtype in _formats.SIXTEEN_BIT
    ]
    largest = max(map(ranges.largest, [*truth.weights, *sixteen]), default=0.0)
    if largest == 0.0:
        return highest
    # Two bits are kept free for the sums inside a layer.
    room = math.floor(math.log2(_formats.FLOAT16.max / largest)) - 2
    return min(max(2.0**room, lowest), highest)


def _blamed(
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
    note = (
        f"the loss is {loss.gap.largest:.3g}, and gradients overflow at a loss "
        f"scale of {latent.LOWEST_SCALE:g}: take means, not sums, and "
        "standardise targets"
    )
    guilty = dataclasses.replace(
        loss, phase=verdicts.BACKWARD, verdict=verdicts.OVERFLOW, note=note
    )
    return [*found, guilty]
