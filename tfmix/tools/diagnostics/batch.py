"""Runs a model and a loss on a batch, without changing any variable."""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from tfmix import _arguments, _bad_rows
from tfmix._keras import layers, training
from tfmix.gradient_scaling import power
from tfmix.ops import tensors
from tfmix.tools.diagnostics import differentiation, probe, programs


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """The input of a check: a built model, one batch and a loss."""

    model: keras.Model
    x: Any
    y: Any
    loss: Any  # a function of `(y, outputs)`, or None
    # The notes say which data was left out.
    notes: tuple[str, ...] = ()

    def weights(self) -> list[Any]:
        """Returns the values of the trainable weights."""
        return [weight.value for weight in self.model.trainable_variables]

    def outputs(self, weights: Sequence[Any]) -> Any:
        """Returns the outputs for given weights; writes no variable."""
        with self._at(weights):
            return training.call_in_training(self.model, self.x)

    def loss_at(self, weights: Sequence[Any]) -> Any:
        """Returns the loss for given weights, `add_loss` terms included.

        It writes no variable, not even a random seed.
        """
        with self._at(weights) as scope:
            outputs = training.call_in_training(self.model, self.x)
            losses = [*map(ops.sum, scope.losses), self._loss(outputs)]
            return sum(ops.cast(loss, "float32") for loss in losses)

    def power(self) -> float:
        """Returns what gradients that enter the model are multiplied by.

        A model that scales its gradients does so while the loss scale has its
        first value.
        """

        def measured(weights: list[Any]) -> Any:
            with self._at(weights) as scope:
                outputs = training.call_in_training(self.model, self.x)
                floats, rebuilt = tensors.floats(outputs)

                def loss(floats: list[Any]) -> list[Any]:
                    return [self._loss(rebuilt(floats))]

                (value,), back = differentiation.pullback(loss, floats)
                gradients = back([ops.ones_like(value)])
                added = [*map(ops.ones_like, scope.losses)]
                return power.of(gradients, added, 1.0).up

        return float(programs.run(measured, self.weights()))

    def _at(self, weights: Sequence[Any]) -> keras.StatelessScope:
        mapping = [*zip(self.model.trainable_variables, weights, strict=True)]
        return keras.StatelessScope(mapping, collect_losses=True)

    def loss_of(self, outputs: Sequence[Any], template: Any) -> Any:
        """Computes the loss of some float outputs, as one scalar."""
        return self._loss(probe.replaced(template, outputs))

    def _loss(self, outputs: Any) -> Any:
        value = self.loss(self.y, outputs)
        return ops.mean(value) if len(value.shape) else value

    def bad_rows(self) -> list[_bad_rows.BadRows]:
        """Finds the rows of `x` and `y` that hold NaN or infinity."""
        return _bad_rows.find({"x": self.x, "y": self.y})

    def without(self, rows: Collection[int]) -> "Batch":
        """Drops some rows, if others remain and the batch size is not fixed."""
        count = _free_rows(self.model, (self.x, self.y))
        if count is None or len(rows) == count:
            return self
        kept = [row for row in range(count) if row not in rows]
        x, y = tree.map_structure(
            lambda leaf: None if leaf is None else ops.take(leaf, kept, axis=0),
            (self.x, self.y),
        )
        return dataclasses.replace(self, x=x, y=y)


def prepare(
    model: keras.Model, x: Any, y: Any, loss: Any, most: int | None
) -> Batch:
    """Checks the arguments of a check, and builds the model if necessary.

    It keeps at most `most` rows, and only the first batch of a dataset.
    """
    _arguments.model(model)
    x, y = first(x, y)
    notes: tuple[str, ...] = ()
    rows = most and _free_rows(model, (x, y))
    if most and rows and rows > most:
        x, y = tree.map_structure(
            lambda leaf: None if leaf is None else leaf[:most], (x, y)
        )
        note = f"`x` has {rows:,} rows; the first {most} of them were checked."
        notes = (note,)
    x, y = tree.map_structure(_tensor, (x, y))
    _check_not_empty(x)
    if y is None and loss is not None:
        raise ValueError(
            "A loss needs targets: pass `y`, or leave `loss` out to check "
            f"the forward pass alone. Received: y=None, loss={loss!r}."
        )
    function = None if y is None else _function(model, loss)
    batch = Batch(model, x, y, function, notes)
    if not layers.is_built(model):
        # `fit` would build it, too. The scopes below need its variables.
        model(x)
    return batch


def first(x: Any, y: Any) -> tuple[Any, Any]:
    """Returns a dataset's first batch; arrays are returned unchanged."""
    # TensorFlow need not be installed.
    if not (hasattr(x, "element_spec") and hasattr(x, "as_numpy_iterator")):
        return x, y
    if y is not None:
        raise ValueError(
            "A dataset contains its targets. Received: `x` a dataset and "
            f"y={y!r}. Leave `y` out."
        )
    for element in x.as_numpy_iterator():
        inputs, targets, _ = keras.utils.unpack_x_y_sample_weight(element)
        return inputs, targets
    return np.zeros((0,)), None


def _free_rows(model: keras.Model, nest: Any) -> int | None:
    """Counts the rows; None if no row may be left out."""
    leaves = [leaf for leaf in tree.flatten(nest) if leaf is not None]
    counts = {tuple(np.shape(leaf))[:1] for leaf in leaves}
    inputs = getattr(model, "inputs", None) or ()
    fixed = any(tensor.shape[0] is not None for tensor in inputs)
    if fixed or len(counts) != 1 or counts == {()}:
        return None
    return int(next(iter(counts))[0])


def _check_not_empty(x: Any) -> None:
    shapes = [tuple(leaf.shape) for leaf in tree.flatten(x)]
    if any(shape[:1] == (0,) for shape in shapes):
        # The mean of no losses is NaN, which would look like the model's fault.
        raise ValueError(
            "`x` must hold at least one row; 16 to 64 are enough. "
            f"Received: x of shape {shapes[0]}."
        )


def _tensor(value: Any) -> Any:
    """Converts an array as `fit` does, float64 to Keras's default."""
    if value is None:
        return value
    if getattr(value, "dtype", None) == np.float64:
        value = np.asarray(value, keras.config.floatx())
    return ops.convert_to_tensor(value)


def _function(model: Any, loss: Any) -> Callable[[Any, Any], Any]:
    if loss is None:
        compiled = training.compiled_loss(model)
        if compiled is None:
            raise ValueError(
                "There is no loss to compute gradients of. Received: "
                "loss=None. Pass `loss=`, for example loss="
                '"sparse_categorical_crossentropy", or compile the model.'
            )
        return compiled
    if not callable(loss) or isinstance(loss, keras.losses.Loss):
        return training.compile_loss(loss)

    def call(y: Any, outputs: Any) -> Any:
        # In a custom training loop, targets have the outputs' dtype.
        leaves = probe.floats(outputs)
        if len(leaves) == 1 and probe.is_float(y):
            y = ops.cast(y, leaves[0].dtype)
        return loss(y, outputs)

    return call
