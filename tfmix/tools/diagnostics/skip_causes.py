"""Measures why steps are skipped: because of the data, the loss or a layer."""

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import tree

from tfmix import _bad_rows, _formats
from tfmix._keras import layers, training
from tfmix.gradient_scaling import model_call
from tfmix.tools.diagnostics import batch as batches
from tfmix.tools.diagnostics import probe, verdicts

# So many rows are run if the batch size of `fit` is unknown.
_ROWS = 32
_LOOK = "look for rows of the data that are not finite"


class Cause(NamedTuple):
    """The cause of skipped steps: its kind, and a description."""

    kind: str
    text: str


class Skips(NamedTuple):
    """The steps of an epoch.

    Attributes:
        applied: The number of applied steps.
        skipped: The number of skipped steps.
        of_data: Those of which what entered the backward pass was not finite;
            `None` if that is not known.
        unexplained: Overflows beyond those of trials of a growing scale.
        overflows: How often the gradient of each variable was not finite.
        fall: The loss scale before and after, if it fell, but not to its floor.
        begin_last: Whether the gradient of the last variable was bad each time,
            and no lower scale would have helped.
    """

    applied: int = 0
    skipped: int = 0
    of_data: int | None = None
    unexplained: int = 0
    overflows: Mapping[str, int] = {}
    fall: tuple[float, float] | None = None
    begin_last: bool = False

    @property
    def are_news(self) -> bool:
        """Whether anything but a growing scale was the cause."""
        return bool(self.of_data or self.unexplained)


def of_skips(
    model: keras.Model,
    data: Mapping[str, Any],
    bad: Sequence[_bad_rows.BadRows],
    batch_size: int | None,
    loss: float,
    skips: Skips,
) -> Cause:
    """Returns the likeliest cause of an epoch's skipped steps.

    Args:
        model: The model that `fit` trains.
        data: Its arguments `x`, `y` and `sample_weight`, if they are arrays.
        bad: The rows of the data that hold NaN or infinity.
        batch_size: Rows of a batch.
        loss: The loss in the epoch's logs; NaN if unknown.
        skips: The steps of the epoch.
    """
    is_float16 = layers.computes_in(model, "float16")
    largest = _formats.FLOAT16.max if is_float16 else math.inf
    entered = skips.skipped if skips.of_data is None else skips.of_data
    # Gradients do not overflow in bfloat16.
    in_doubt = skips.of_data is None and is_float16
    rows = {row for each in bad for row in each.rows}
    found = [Cause("data", f"{x.text}; drop or fix them") for x in bad[:1]]
    found = found if entered else []
    # Each row is in one step of an epoch.
    if entered > len(rows):
        loss, layer = _measured(model, data, rows, batch_size, loss)
        if layer is not None:
            found.append(_of_layer(layer, data, largest))
        elif math.isinf(loss):
            found.append(_of_infinite_loss(data))
        elif in_doubt and not skips.begin_last:
            found.append(_of_overflow(skips, "" if data else _LOOK))
        elif not found:
            found.append(_of_loss(data, largest))
    if skips.of_data is not None and skips.unexplained:
        found.append(_of_overflow(skips))
    if not found:
        return Cause("unknown", verdicts.CHECK)
    return Cause(found[-1].kind, ". Also, ".join(x.text for x in found))


def _measured(
    model: keras.Model,
    data: Mapping[str, Any],
    bad_rows: Collection[int],
    batch_size: int | None,
    loss: float,
) -> tuple[float, "_Bad | None"]:
    """Returns the loss of the largest rows, and a layer that is not finite."""
    batch = _worst_rows(data, bad_rows, batch_size or _ROWS)
    if not batch:
        return loss, None
    measured, bad = _run(model, batch)
    return loss if math.isnan(measured) and not bad else measured, bad


def _of_infinite_loss(data: Mapping[str, Any]) -> Cause:
    return Cause(
        "loss",
        f"the loss is infinite, and targets reach {_largest(data.get('y')):.3g}"
        "; standardise them: y = (y - y.mean()) / y.std()",
    )


def _of_loss(data: Mapping[str, Any], largest: float) -> Cause:
    """Returns the cause of which only the gradient of the loss is known."""
    beyond = f" or beyond {largest:g}" if math.isfinite(largest) else ""
    advice = verdicts.CHECK if data else f"{_LOOK}{beyond}"
    return Cause("entered", f"the loss was not finite; {advice}")


def _of_overflow(skips: Skips, also: str = "") -> Cause:
    """Returns the cause of gradients that overflowed inside a model."""
    counts = skips.overflows
    worst = max(counts, key=counts.__getitem__, default="")
    also = also and f"; {also}"
    if skips.fall is not None:
        high, low = skips.fall
        return Cause(
            "scale",
            f"gradients overflowed, most often that of {worst!r}, while the "
            f"loss scale settles: it fell from {high:g} to {low:g} so far"
            f"{also}",
        )
    if not (worst and counts[worst]):
        return Cause("unknown", f"{verdicts.CHECK}{also}")
    return Cause(
        "gradient",
        f"the gradient of {worst!r} overflows most often; keep its layer in "
        f'`dtype="float32"`, clip, or lower the learning rate{also}',
    )


class _Bad(NamedTuple):
    """The first layer that returns NaN or infinity."""

    layer: str
    has_finite_inputs: bool


def _of_layer(bad: _Bad, data: Mapping[str, Any], largest: float) -> Cause:
    reached, targets = _largest(data["x"]), _largest(data.get("y"))
    if reached > largest and not bad.has_finite_inputs:
        return Cause(
            "x",
            _bad_rows.beyond("`x`", reached, "float16", largest)
            + "; scale it, or use 'mixed_bfloat16'",
        )
    where = ""
    if targets > largest:
        where = f" (targets reach {targets:.3g}, float16 ends at {largest:g})"
    return Cause(
        f"layer {bad.layer}",
        f"the output of layer {bad.layer!r} is not finite{where}; give it "
        '`dtype="float32"`',
    )


def arrays(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `fit` that are arrays, and so can be reread."""
    return {
        name: nest
        for name, nest in arguments.items()
        if nest is not None and all(map(_bad_rows.is_array, tree.flatten(nest)))
    }


def _largest(nest: Any) -> float:
    tops = [
        float(np.abs(block).max(initial=0.0, where=np.isfinite(block)))
        for leaf in tree.flatten(nest)
        for _, block in _bad_rows.blocks(leaf)
    ]
    return max(tops, default=0.0)


def _worst_rows(
    data: Mapping[str, Any], left_out: Collection[int], count: int
) -> dict[str, Any]:
    """Returns a batch of the rows of `x` with the largest values.

    It is empty without `x`, and if all rows are left out.
    """
    if "x" not in data:
        return {}
    first, *_ = tree.flatten(data["x"])
    tops = [np.abs(block).max(axis=1) for _, block in _bad_rows.blocks(first)]
    order = np.arange(first.shape[0])
    if tops:
        order = np.argsort(-np.concatenate(tops), kind="stable")
    rows = np.sort(order[~np.isin(order, [*left_out])][:count])
    if not rows.size:
        return {}
    take = functools.partial(np.take, indices=rows, axis=0)
    return {
        name: tree.map_structure(lambda leaf: take(np.asarray(leaf)), nest)
        for name, nest in data.items()
    }


def _run(
    model: keras.Model, batch: Mapping[str, Any]
) -> tuple[float, _Bad | None]:
    """Returns the loss of a batch, and the first layer that is not finite.

    The loss is NaN if the batch cannot be run. No variable is written.
    """
    bad: list[_Bad] = []
    loss = math.nan

    def on_call(call: probe.Call) -> Any:
        outputs = call.proceed()
        if not bad and not probe.is_finite(outputs):
            bad.append(_Bad(call.target.name, probe.is_finite(call.tensors)))
        return outputs

    y = None if training.compiled_loss(model) is None else batch.get("y")
    try:
        made = batches.prepare(model, batch["x"], y, None, None)
        watched = probe.watched(probe.targets(model), on_call)
        with watched, model_call.outputs_as_made():
            weights = made.weights()
            if y is None:
                made.outputs(weights)
            else:
                loss = float(made.loss_at(weights))
    except Exception:
        # A custom `train_step` may call the model in another way.
        loss = math.nan
    return loss, next(iter(bad), None)
