"""`NumericsMonitor` checks every layer's numbers on sampled steps of `fit`."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from tfmix import _arguments, _bad_rows, _formats, _messages
from tfmix._keras import layers, training
from tfmix.callbacks import sampler
from tfmix.conversion import planned_policies
from tfmix.diagnostics import (
    float8_products,
    missing_scaler,
    probe,
    progress_bar,
    ranges,
    verdicts,
)
from tfmix.float8 import chosen_layers


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
        self._prepared = self._failed = False

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
            self._prepared = self._failed = False
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

    def _prepare(self, model: Any, batch: Any) -> None:
        if not layers.is_built(model):
            x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
            # A symbolic call draws no random numbers and changes no variable.
            model(keras.tree.map_structure(_symbol, x))
        sixteen = planned_policies.sixteen_bit_layers(model)
        # A model without 16-bit layers is measured as float16 would see it.
        dtype = sixteen[0].compute_dtype if sixteen else "float16"
        self._limits = _formats.limits(dtype)
        self._found = probe.targets(model)
        paths = [variable.path for variable in model.trainable_variables]
        self._reader = Reader(self._found, paths, self._limits)
        self._sampler = sampler.Sampler(model, self._found, self._limits)
        self._exact: sampler.Sampler | None = None
        self._products: sampler.ProductSampler | None = None
        self._cleared: set[str] = set()
        self._prepared = True

    def _look(self, state: Any, batch: Any) -> None:
        if self._failed:
            return
        try:
            if not self._prepared:
                self._prepare(self._model_of, batch)
            self._read(self._sampler(state, batch), state, batch)
        except Exception as error:
            # A fault of the monitor must not stop the training.
            self._failed = True
            _messages.warn(
                "NumericsMonitor cannot sample this model and is off: %s: %s",
                type(error).__name__,
                error,
            )

    def _read(self, sample: sampler.Sample, state: Any, batch: Any) -> None:
        self.rows = self._reader.rows(sample)
        self._headroom = min(
            (
                row.measures.headroom_bits
                for call, row in zip(sample.calls, self.rows, strict=False)
                if call.dtype in _formats.SIXTEEN_BIT
            ),
            default=math.nan,
        )
        x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
        bad_rows = _bad_rows.find({"x": x, "y": y})
        for bad in bad_rows:
            # The data is at fault, so no layer is named.
            forward, verdict = verdicts.FORWARD, verdicts.NOT_FINITE
            self._add(bad.name, forward, verdict, bad.text)
        if bad_rows:
            pass
        elif fault := self._reader.forward(sample):
            layer, verdict = fault
            self._add(layer, verdicts.FORWARD, verdict)
        elif overflowing := self._reader.overflow(sample):
            lowest = self._lowest_scale()
            if sample.scale > lowest:
                # At a higher scale, the rule lowers the scale by itself.
                again = self._sampler(state, batch, lowest)
                overflowing = self._reader.overflow(again)
            if overflowing:
                self._add(overflowing, verdicts.BACKWARD, verdicts.OVERFLOW)
        else:
            self._add_underflow(sample, state, batch)
        if self._products is None:
            # The model's first call has chosen the float8 layers by now.
            chosen = chosen_layers.chosen(self._model_of)
            self._products = sampler.ProductSampler(self._model_of, chosen)
        self.products = self._products(state, batch)
        for worst in self.products[:1]:
            if not worst.is_fine:
                self._add(worst.layer, f"float8 {worst.product}", worst.verdict)

    def _add_underflow(
        self, sample: sampler.Sample, state: Any, batch: Any
    ) -> None:
        layer = self._reader.underflow(sample)
        if layer is None or layer in self._cleared:
            return
        if self._exact is None:
            plan = planned_policies.reference(self._model_of)
            self._exact = sampler.Sampler(
                self._model_of, self._found, self._limits, plan
            )
        # A gradient that is zero in float32 as well has not vanished.
        exact = self._exact(state, batch, sample.scale)
        maker = self._reader.lost(sample, exact)
        if maker is None:
            self._cleared.add(layer)
        else:
            self._add(maker, verdicts.BACKWARD, verdicts.UNDERFLOW)

    def _lowest_scale(self) -> float:
        rule = getattr(self._model_of.optimizer, "rule", None)
        return (rule and rule.lowest_scale) or 1.0

    def _add(
        self, layer: str, phase: str, verdict: str, text: str = ""
    ) -> None:
        step = self._tap.step if self._tap else self._step
        event = Event(step, layer, phase, verdict)
        earlier = {dataclasses.replace(old, step=step) for old in self.events}
        if event not in earlier:
            text = text or verdicts.fault(layer, phase, verdict)
            progress_bar.warn(self, "step %d: %s", step, text)
        self.events.append(event)


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
            TensorRanges(name, phase, ranges.from_vector(row, self.limits))
            for layers, phase, table in (
                (names, "forward", sample.forward[:, : len(ranges.COLUMNS)]),
                (names, "backward", sample.backward),
                (self.variables, "weights", sample.weights),
                (self.variables, "weight_gradients", sample.gradients),
            )
            for name, row in zip(layers, table, strict=True)
        ]

    def forward(self, sample: sampler.Sample) -> tuple[str, str] | None:
        """Returns the layer and verdict of the first fault, going forward."""
        faults: dict[str, str] = {}
        for call, row in zip(sample.calls, sample.forward, strict=True):
            if (verdict := self._own_fault(call, row)) != verdicts.OK:
                faults.setdefault(self.found[call.target].name, verdict)
        for name in probe.around(faults, self.found) & faults.keys():
            del faults[name]
        severe = (verdicts.OVERFLOW, verdicts.NOT_FINITE)
        hard = [fault for fault in faults.items() if fault[1] in severe]
        if faults:
            return (hard or list(faults.items()))[0]
        for call, row in zip(sample.calls, sample.forward, strict=True):
            if _not_finite(row):
                # The layer's input or weights were not finite before.
                return self.found[call.target].name, verdicts.NOT_FINITE
        return None

    def backward(
        self, sample: sampler.Sample, bad: Callable[[Any], bool]
    ) -> str | None:
        """Returns the layer whose gradients are bad first, going back.

        `bad` judges a row of gradients. The layer is the one that receives
        good gradients and computes bad ones, for its inputs or weights. The
        result is `"loss"` if the loss does, and None if no gradient is bad.
        Code between two layers counts as part of the layer before it.
        """
        received = {
            index: call.dtype in _formats.SIXTEEN_BIT
            and bad(sample.backward[index])
            for index, call in enumerate(sample.calls)
        }

        def computes(rows: Sequence[int]) -> bool:
            return any(bad(self._rounded(sample.inputs[row])) for row in rows)

        # A bad gradient that no layer receives does no harm.
        reached = min((at for at in received if received[at]), default=math.inf)
        if reached < math.inf and computes(sample.loss_inputs):
            return verdicts.LOSS
        faulty: list[str] = []
        for index, call in reversed(list(enumerate(sample.calls))):
            name = self.found[call.target].name
            if received[index]:
                faulty = faulty or [name]
            elif self._weights_bad(call.target, sample, bad) or (
                index > reached and computes(call.inputs)
            ):
                faulty.append(name)
        outer = probe.around(faulty, self.found)
        return next((name for name in faulty if name not in outer), None)

    def _rounded(self, row: Any) -> Any:
        """Returns a gradient's row as it would be after a cast to 16 bit."""
        if _column(row, "largest") <= self.limits.max:
            return row
        row = np.array(row)
        row[ranges.COLUMNS.index("not_finite")] = 1.0
        return row

    def overflow(self, sample: sampler.Sample) -> str | None:
        """Returns the layer whose gradients overflow first, going back.

        If the loss itself is out of the format's range, as a sum over pixels
        may be, it is the reason for all later overflows.
        """
        layer = self.backward(sample, _not_finite)
        too_large = abs(sample.loss) > self.limits.max
        return verdicts.LOSS if layer and too_large else layer

    def lost(self, sample: sampler.Sample, exact: sampler.Sample) -> str | None:
        """Returns the first layer, going back, that loses a whole gradient.

        `exact` is the same step in float32. Gradients that are zero there are
        ignored; the result is None if no others vanish.
        """
        largest = ranges.COLUMNS.index("largest")

        def nonzero(rows: np.ndarray, right: np.ndarray) -> np.ndarray:
            # Infinity marks a row to ignore: it does not count as vanished.
            return np.where(right[:, [largest]] > 0.0, rows, np.inf)

        kept = dataclasses.replace(
            sample,
            backward=nonzero(sample.backward, exact.backward),
            inputs=nonzero(sample.inputs, exact.inputs),
            gradients=nonzero(sample.gradients, exact.gradients),
        )
        return self.underflow(kept)

    def underflow(self, sample: sampler.Sample) -> str | None:
        """Returns the layer whose gradients vanish first, going back."""

        def vanished(row: Any) -> bool:
            # A gradient with fewer than four bits is noise.
            small = _column(row, "largest") < 16 * self.limits.smallest
            return small and not _not_finite(row)

        return self.backward(sample, vanished)

    def _weights_bad(
        self, index: int, sample: sampler.Sample, bad: Callable[[Any], bool]
    ) -> bool:
        target = self.found[index]
        if not target.whole:
            return False
        paths = {variable.path for variable in target.weights}
        named = zip(self.variables, sample.gradients, strict=True)
        rows = [row for path, row in named if path in paths]
        # One overflow is a fault. A single zero is not: it may be a bias
        # before a normalisation.
        overflowed = any(map(_not_finite, rows)) and any(map(bad, rows))
        return overflowed or (bool(rows) and all(map(bad, rows)))

    def _own_fault(self, call: sampler.Call, row: Any) -> str:
        measured = ranges.from_vector(row[: len(ranges.COLUMNS)], self.limits)
        error, broken = row[len(ranges.COLUMNS) :]
        if broken:
            return verdicts.OK
        gap = ranges.Gap(
            float(error),
            cosine=1.0,
            lost=not math.isfinite(error),
            only_nan=False,
            broken=False,
            flushed=measured.zero if error >= 1 else 0.0,
            subnormal=measured.subnormal,
            headroom_bits=measured.headroom_bits,
        )
        return verdicts.of_output(gap, self.limits)


def _not_finite(row: Any) -> bool:
    """Returns whether a row of measures is of a tensor with NaN or infinity."""
    return _column(row, "not_finite") > 0


def _column(row: Any, name: str) -> float:
    return float(row[ranges.COLUMNS.index(name)])
