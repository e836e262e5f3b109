"""Watches every layer's numbers in a running `fit`, on sampled steps."""

import dataclasses
from typing import Any

import keras
from absl import logging

from tfmix import _arguments, _formats
from tfmix._keras import layers
from tfmix.callbacks import batch_tap, reading, sampler
from tfmix.conversion import planned_policies
from tfmix.doctor import probe, verdicts
from tfmix.policy.in_force import suited_optimizer


class NumericsMonitor(keras.callbacks.Callback):
    """Names the layer at which a running training goes wrong.

    On each sampled step the same batch runs through a second, instrumented
    copy of the training step, compiled like the first. It measures what every
    layer returns, the gradients, the weights and their gradients, and
    compares each layer with itself in float32. Nothing of the model changes;
    the numbers are a few floats per layer, copied to the host on sampled
    steps only. Under a distribution strategy the first replica is sampled.

    A gradient that overflows under the loss scale in force is no event if it
    does not at a scale of 1: that is how dynamic scaling finds its scale.

    Args:
        every: Integer, steps between two samples; the first step is one.
            Defaults to `100`, which costs about as much as two steps more in
            a hundred.

    Attributes:
        events: List of `Event` (`step`, `layer`, `phase`, `verdict`): the
            first layer at fault in the forward pass of a sampled step, and,
            if there is none, in the backward pass.
        rows: The `TensorRanges` of the last sample (`layer`, `phase`,
            `measures`).

    Raises:
        TypeError: If `every` is not an integer.
        ValueError: If `every` is below 1.

    Example:
        >>> NumericsMonitor(every=10).events
        []
    """

    def __init__(self, every: int = 100) -> None:
        super().__init__()
        self.every = _arguments.count("every", every, example=100)
        self.events: list[reading.Event] = []
        self.rows: list[reading.TensorRanges] = []
        self._step = 0
        self._tap: batch_tap.Tap | None = None
        self._model_of: Any = None
        self._prepared = self._failed = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Puts the tap in front of the training function."""
        # Not `self.model`, which would bring the state back on JAX.
        model = self._model
        function = batch_tap.original(model.train_function)
        self._tap = batch_tap.Tap(
            function, model, self.every, self._look, self._step
        )
        model.train_function = self._tap
        if self._model_of is not model:
            self._model_of = model
            self._prepared = self._failed = False
            if note := suited_optimizer.missing_scaler_warning(model):
                logging.warning("NumericsMonitor: %s", note)

    def on_train_end(self, logs: Any = None) -> None:
        """Takes the tap away."""
        if self._tap is not None:
            self._step = self._tap.step
            self._model.train_function = self._tap.original
            self._tap = None

    def _prepare(self, model: Any, batch: Any) -> None:
        _build(model, batch)
        sixteen = planned_policies.sixteen_bit_layers(model)
        # A model without 16-bit layers is measured as float16 would see it.
        dtype = sixteen[0].compute_dtype if sixteen else "float16"
        self._limits = _formats.limits(dtype)
        self._found = probe.targets(model)
        self._reader = reading.Reader(
            self._found,
            [variable.path for variable in model.trainable_variables],
            self._limits,
        )
        self._sampler = sampler.Sampler(model, self._found, self._limits)
        self._exact: sampler.Sampler | None = None
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
            # A monitor must not end the training that it watches.
            self._failed = True
            logging.warning(
                "NumericsMonitor cannot sample this model and is off: %s: %s",
                type(error).__name__,
                error,
            )

    def _read(self, sample: sampler.Sample, state: Any, batch: Any) -> None:
        self.rows = self._reader.rows(sample)
        if forward := self._reader.forward(sample):
            layer, verdict = forward
            self._add(layer, verdicts.FORWARD, verdict)
        elif found := self._reader.overflow(sample):
            if sample.scale > 1.0:
                # At a higher scale it is part of the search for one.
                again = self._sampler(state, batch, 1.0)
                found = self._reader.overflow(again)
            if found:
                self._add(found, verdicts.BACKWARD, verdicts.OVERFLOW)
        else:
            self._add_underflow(sample, state, batch)

    def _add_underflow(
        self, sample: sampler.Sample, state: Any, batch: Any
    ) -> None:
        layer = self._reader.underflow(sample)
        if layer is None or layer in self._cleared:
            return
        if self._exact is None:
            self._exact = sampler.Sampler(
                self._model_of,
                self._found,
                self._limits,
                planned_policies.reference(self._model_of),
            )
        # Zeros that are zeros in float32, too, are the model's own.
        exact = self._exact(state, batch, sample.scale)
        maker = self._reader.lost(sample, exact)
        if maker is None:
            self._cleared.add(layer)
        else:
            self._add(maker, verdicts.BACKWARD, verdicts.UNDERFLOW)

    def _add(self, layer: str, phase: str, verdict: str) -> None:
        step = self._tap.step if self._tap else self._step
        event = reading.Event(step, layer, phase, verdict)
        known = {dataclasses.replace(old, step=step) for old in self.events}
        if event not in known:
            logging.warning(
                "Step %d: %s in the %s pass of layer %r. tfmix.check(model, "
                "x, y) says what to write.",
                step,
                verdict,
                phase,
                layer,
            )
        self.events.append(event)


def _build(model: Any, batch: Any) -> None:
    """Builds a model that would build itself while its step is traced."""
    if all(layer.built for layer in layers.flat_layers(model)):
        return
    x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)

    def symbol(leaf: Any) -> keras.KerasTensor:
        return keras.KerasTensor(tuple(leaf.shape), probe.dtype(leaf))

    # By symbols: no seed is drawn from, and no statistics move.
    model(keras.tree.map_structure(symbol, x))
