"""`NumericsMonitor` checks every layer's numbers on sampled steps of `fit`."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras

from tfmix import _arguments, _bad_rows, _formats, _messages
from tfmix._keras import layers, training
from tfmix.conversion import planned_policies
from tfmix.float8 import chosen_layers
from tfmix.tools.callbacks import sampler
from tfmix.tools.diagnostics import (
    float8_products,
    missing_scaler,
    probe,
    progress_bar,
    ranges,
    verdicts,
)


class NumericsMonitor(keras.callbacks.Callback):
    """Names the layer at which training goes wrong, while `fit` runs.

    On each sampled step, the batch also runs through an instrumented copy of
    the training step, which is compiled like the original. It measures each
    layer's outputs, the gradients, the weights and their gradients, and
    compares each layer with itself in float32. The model does not change.
    Only sampled steps copy numbers to the host, a few floats per layer. Under
    a distribution strategy, the first replica is sampled.

    A gradient that overflows under the current loss scale, but not at a scale
    of 1, is not an event: dynamic scaling finds its scale in this way.

    The epoch's logs gain `numerics_events`, the number of faults found so far,
    and `headroom_bits`: how often the largest output of a 16-bit layer in the
    last sample can be doubled before it overflows. Put the monitor before
    `keras.callbacks.TensorBoard` in the list of callbacks, so that it writes
    both.

    Under `"mixed_float8"`, the float8 products are compared with float32 on
    the same batch.

    Args:
        every: Integer, steps between two samples; the first step is sampled.
            Defaults to `100`, which costs about as much as two more steps in
            a hundred.

    Attributes:
        events: List of `Event` (`step`, `layer`, `phase`, `verdict`): the
            first faulty layer in the forward pass of a sampled step or, if
            there is none, in the backward pass.
        rows: The `TensorRanges` of the last sample (`layer`, `phase`,
            `measures`).
        products: The `Float8Product` of the last sample (`layer`, `product`,
            `underflow`, `saturated`, `cosine`, `verdict`), the worst first.

    Raises:
        TypeError: If `every` is not an integer.
        ValueError: If `every` is below 1.

    Examples:
        >>> NumericsMonitor(every=10).events
        []
    """

    def __init__(self, every: int = 100) -> None:
        super().__init__()
        self.every = _arguments.count("every", every, example=100)
        self.events: list[Event] = []
        self.rows: list[TensorRanges] = []
        self.products: list[float8_products.Float8Product] = []
        self._headroom: float | None = None
        self._step = 0
        self._tap: Tap | None = None
        self._model_of: Any = None
        self._instruments: _Instruments | None = None
        self._failed = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Replaces the training function with a `Tap`."""
        model = training.model_in_step(self)
        function = model.train_function
        while isinstance(function, Tap):
            function = function.original
        self._tap = Tap(function, model, self.every, self._look, self._step)
        model.train_function = self._tap
        if self._model_of is not model:
            self._model_of = model
            self._instruments, self._failed = None, False
            if note := missing_scaler.warning(model):
                _messages.warn("%s", note)

    def on_train_end(self, logs: Any = None) -> None:
        """Restores the training function."""
        if self._tap is not None:
            self._step = self._tap.step
            training.model_in_step(self).train_function = self._tap.original
            self._tap = None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Adds the results of the samples to the epoch's logs."""
        if logs is not None and self._headroom is not None:
            logs["headroom_bits"] = self._headroom
            logs["numerics_events"] = float(len(self.events))

    def _look(self, state: Any, batch: Any) -> None:
        if self._failed:
            return
        try:
            if self._instruments is None:
                self._instruments = _Instruments(self._model_of, batch)
            self._read(self._instruments, state, batch)
        except Exception as error:
            # A fault of the monitor must not stop the training.
            self._failed = True
            _messages.warn(
                "NumericsMonitor cannot sample this model and is off: %s: %s",
                type(error).__name__,
                error,
            )

    def _read(self, use: "_Instruments", state: Any, batch: Any) -> None:
        sample = use.sampler(state, batch)
        self.rows = use.reader.rows(sample)
        self._headroom = min(
            (
                output.headroom_bits
                for call, output in zip(
                    sample.calls, sample.outputs, strict=True
                )
                if call.dtype in _formats.SIXTEEN_BIT
            ),
            default=math.nan,
        )
        x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
        bad_rows = _bad_rows.find({"x": x, "y": y})
        for bad in bad_rows:
            # The data is at fault, so no layer is named.
            place = bad.name, verdicts.FORWARD, verdicts.NOT_FINITE
            self._add(*place, bad.text)
        if not bad_rows and (fault := use.fault(sample, state, batch)):
            self._add(*fault)
        self.products = use.products(state, batch)
        for worst in self.products[:1]:
            if not worst.is_fine:
                self._add(worst.layer, f"float8 {worst.product}", worst.verdict)

    def _add(
        self, layer: str, phase: str, verdict: str, text: str = ""
    ) -> None:
        step = self._tap.step if self._tap else self._step
        fault = layer, phase, verdict
        if fault not in {(x.layer, x.phase, x.verdict) for x in self.events}:
            text = text or verdicts.fault(*fault)
            progress_bar.warn(self, "step %d: %s", step, text)
        self.events.append(Event(step, *fault))


class _Instruments:
    """The samplers of one model, and the reader of their samples."""

    def __init__(self, model: keras.Model, batch: Any) -> None:
        if not layers.is_built(model):
            x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
            # A symbolic call draws no random numbers and changes no variable.
            model(keras.tree.map_structure(_symbol, x))
        sixteen = planned_policies.sixteen_bit_layers(model)
        # A model without 16-bit layers is measured as float16 would see it.
        dtype = sixteen[0].compute_dtype if sixteen else "float16"
        self._model, self._found = model, probe.targets(model)
        self._limits = _formats.LIMITS[dtype]
        paths = [variable.path for variable in model.trainable_variables]
        self.reader = Reader(self._found, paths, self._limits)
        self.sampler = sampler.Sampler(model, self._found, self._limits)
        # The layers whose gradients vanish in float32 as well.
        self._cleared: set[str] = set()

    @functools.cached_property
    def _exact(self) -> sampler.Sampler:
        plan = planned_policies.reference(self._model)
        return sampler.Sampler(self._model, self._found, self._limits, plan)

    @functools.cached_property
    def products(self) -> sampler.ProductSampler:
        """The sampler of float8 products."""
        # The model's first call has chosen the float8 layers by now.
        chosen = chosen_layers.chosen(self._model)
        return sampler.ProductSampler(self._model, chosen)

    def fault(
        self, sample: sampler.Sample, state: Any, batch: Any
    ) -> tuple[str, str, str] | None:
        """Returns the first fault of a sample: layer, phase and verdict."""
        if found := self.reader.forward(sample):
            layer, verdict = found
            return layer, verdicts.FORWARD, verdict
        rule = getattr(self._model.optimizer, "rule", None)
        lowest = (rule and rule.lowest_scale) or 1.0
        verdict, loser = verdicts.OVERFLOW, self.reader.overflow(sample)
        if loser is None:
            verdict = verdicts.UNDERFLOW
            loser = self._underflow(sample, state, batch)
        elif sample.scale > lowest:
            # At a higher scale, the rule lowers the scale by itself.
            loser = self.reader.overflow(self.sampler(state, batch, lowest))
        return (loser, verdicts.BACKWARD, verdict) if loser else None

    def _underflow(
        self, sample: sampler.Sample, state: Any, batch: Any
    ) -> str | None:
        """Returns the layer whose gradients vanish first, going back.

        A gradient that is zero in float32 as well has not vanished.
        """
        layer = self.reader.underflow(sample)
        if layer is None or layer in self._cleared:
            return None
        exact = self._exact(state, batch, sample.scale)
        loser = self.reader.lost(sample, exact)
        if loser is None:
            self._cleared.add(layer)
        return loser


def _symbol(leaf: Any) -> keras.KerasTensor:
    return keras.KerasTensor(tuple(leaf.shape), probe.dtype(leaf))


class Tap:
    """Replaces `model.train_function`, and passes some batches to a function.

    Before a sampled step, `look` gets the batch and the state: the values of
    all variables on JAX, and None on TensorFlow.
    """

    def __init__(
        self,
        original: Any,
        model: keras.Model,
        every: int,
        look: Callable[[Any, Any], None],
        step: int,
    ) -> None:
        self.original, self.step = original, step
        self._every, self._look = every, look
        # One call runs several steps if `steps_per_execution` is above 1.
        self._stride = max(int(model.steps_per_execution), 1)
        # The first step of a run is sampled, then every multiple.
        self._next = -(-step // every) * every

    def __call__(self, *arguments: Any) -> Any:
        """Runs the training step or steps."""
        *state, batches = arguments
        if self.step < self._next:
            outputs = self.original(*state, batches)
        else:
            self._next = self.step - self.step % self._every + self._every
            batch = next(batches)
            first = keras.tree.map_structure(_first_replica, batch)
            self._look(state[0] if state else None, first)
            # The training step gets the batch that was taken, too.
            outputs = self.original(*state, itertools.chain([batch], batches))
        self.step += self._stride
        return outputs


def _first_replica(leaf: Any) -> Any:
    """Returns the first replica's part of an array of the batch."""
    # The class is compared by name, so that TensorFlow is not imported.
    distributed = type(leaf).__name__ in ("PerReplica", "DistributedValues")
    return leaf.values[0] if distributed else leaf


@dataclasses.dataclass(frozen=True)
class Event:
    """A fault in a sampled step.

    Attributes:
        step: The training step, from 0.
        layer: The layer that caused it, or `"loss"`; `"x"` or `"y"` for the
            data.
        phase: `"forward"`, `"backward"`, or `"float8 "` and a product of the
            layer's.
        verdict: `"overflow"`, `"underflow"`, `"inaccurate"` or
            `"not_finite"`.
    """

    step: int
    layer: str
    phase: str
    verdict: str


@dataclasses.dataclass(frozen=True)
class TensorRanges:
    """One tensor of one sampled step.

    Attributes:
        layer: The layer's name; the path of a weight.
        phase: `"forward"` for outputs, `"backward"` for their gradients,
            `"weights"` or `"weight_gradients"`. Gradients are multiplied by
            the loss scale.
        measures: The `Measures` of all its numbers together.
    """

    layer: str
    phase: str
    measures: ranges.Measures


@dataclasses.dataclass(frozen=True, eq=False)
class Reader:
    """Reads the samples of one model."""

    found: Sequence[probe.Target]
    variables: Sequence[str]  # the paths of the trainable weights
    limits: _formats.Format

    def rows(self, sample: sampler.Sample) -> list[TensorRanges]:
        """Returns a row for every tensor of a sample."""
        names = [self.found[call.target].name for call in sample.calls]
        return [
            TensorRanges(name, phase, measures)
            for owners, phase, measured in (
                (names, "forward", sample.outputs),
                (names, "backward", sample.output_gradients),
                (self.variables, "weights", sample.weights),
                (self.variables, "weight_gradients", sample.gradients),
            )
            for name, measures in zip(owners, measured, strict=True)
        ]

    def forward(self, sample: sampler.Sample) -> tuple[str, str] | None:
        """Returns the layer and verdict of the first fault, going forward."""
        faults: dict[str, str] = {}
        names = [self.found[call.target].name for call in sample.calls]
        for name, measures, (error, broken) in zip(
            names, sample.outputs, sample.errors, strict=True
        ):
            verdict = self._verdict(measures, float(error))
            if verdict != verdicts.OK and not broken:
                faults.setdefault(name, verdict)
        for name in probe.around(faults, self.found) & faults.keys():
            del faults[name]
        severe = (verdicts.OVERFLOW, verdicts.NOT_FINITE)
        hard = [fault for fault in faults.items() if fault[1] in severe]
        if faults:
            return (hard or list(faults.items()))[0]
        for name, measures in zip(names, sample.outputs, strict=True):
            if measures.not_finite:
                # The layer's input or weights were not finite before.
                return name, verdicts.NOT_FINITE
        return None

    def backward(
        self, sample: sampler.Sample, is_bad: Callable[[ranges.Measures], bool]
    ) -> str | None:
        """Returns the layer whose gradients are bad first, going back.

        It is the layer that receives good gradients and computes bad ones, for
        its inputs or weights. The result is `"loss"` if the loss does, and None
        if no gradient is bad. Code between two layers counts as part of the
        layer before it.
        """
        received = [
            call.dtype in _formats.SIXTEEN_BIT and is_bad(gradient)
            for call, gradient in zip(
                sample.calls, sample.output_gradients, strict=True
            )
        ]

        def computes(entries: Sequence[int]) -> bool:
            gradients = (sample.inputs[entry] for entry in entries)
            return any(is_bad(self._rounded(each)) for each in gradients)

        # A bad gradient that no layer receives does no harm.
        reached = received.index(True) if True in received else math.inf
        if reached < math.inf and computes(sample.loss_inputs):
            return verdicts.LOSS
        faulty: list[str] = []
        for index, call in reversed(list(enumerate(sample.calls))):
            name = self.found[call.target].name
            if received[index]:
                faulty = faulty or [name]
            elif self._weights_bad(call.target, sample, is_bad) or (
                index > reached and computes(call.inputs)
            ):
                faulty.append(name)
        outer = probe.around(faulty, self.found)
        return next((name for name in faulty if name not in outer), None)

    def _rounded(self, gradient: ranges.Measures) -> ranges.Measures:
        """Returns a gradient's measures as after a cast to 16 bit."""
        if gradient.largest <= self.limits.max:
            return gradient
        return dataclasses.replace(gradient, not_finite=1.0)

    def overflow(self, sample: sampler.Sample) -> str | None:
        """Returns the layer whose gradients overflow first, going back.

        If the loss itself is out of the format's range, as a sum over pixels
        may be, it is the reason for all later overflows.
        """
        layer = self.backward(sample, _overflowed)
        too_large = abs(sample.loss) > self.limits.max
        return verdicts.LOSS if layer and too_large else layer

    def lost(self, sample: sampler.Sample, exact: sampler.Sample) -> str | None:
        """Returns the first layer, going back, that loses a whole gradient.

        `exact` is the same step in float32. Gradients that are zero there are
        ignored; the result is None if no others vanish.
        """

        def nonzero(
            near: list[ranges.Measures], right: list[ranges.Measures]
        ) -> list[ranges.Measures]:
            # A gradient that is not finite has not vanished.
            return [
                a if b.largest else dataclasses.replace(a, not_finite=1.0)
                for a, b in zip(near, right, strict=True)
            ]

        return self.underflow(
            dataclasses.replace(
                sample,
                output_gradients=nonzero(
                    sample.output_gradients, exact.output_gradients
                ),
                inputs=nonzero(sample.inputs, exact.inputs),
                gradients=nonzero(sample.gradients, exact.gradients),
            )
        )

    def underflow(self, sample: sampler.Sample) -> str | None:
        """Returns the layer whose gradients vanish first, going back."""

        def vanished(gradient: ranges.Measures) -> bool:
            # A gradient with fewer than four bits is noise.
            small = gradient.largest < 16 * self.limits.smallest
            return small and not gradient.not_finite

        return self.backward(sample, vanished)

    def _weights_bad(
        self,
        index: int,
        sample: sampler.Sample,
        is_bad: Callable[[ranges.Measures], bool],
    ) -> bool:
        target = self.found[index]
        if not target.whole:
            return False
        paths = {variable.path for variable in target.weights}
        named = zip(self.variables, sample.gradients, strict=True)
        gradients = [each for path, each in named if path in paths]
        # One overflow is a fault. A single zero is not: it may be a bias
        # before a normalisation.
        overflowed = any(map(_overflowed, gradients))
        some, every = any(map(is_bad, gradients)), all(map(is_bad, gradients))
        return (overflowed and some) or (bool(gradients) and every)

    def _verdict(self, output: ranges.Measures, error: float) -> str:
        """Returns the verdict on an output that is finite in float32."""
        gap = ranges.Gap(
            error,
            cosine=1.0,
            lost=not math.isfinite(error),
            only_nan=False,
            broken=False,
            flushed=output.zero if error >= 1 else 0.0,
            subnormal=output.subnormal,
            headroom_bits=output.headroom_bits,
        )
        return verdicts.of_output(gap, self.limits)


def _overflowed(gradient: ranges.Measures) -> bool:
    return gradient.not_finite > 0
