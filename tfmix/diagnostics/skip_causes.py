"""Why steps are skipped, by what can be measured: data, loss, layers."""

import functools
import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops, tree

from tfmix import _bad_rows, _formats
from tfmix._keras import layers
from tfmix.autocast import own_code
from tfmix.diagnostics import probe, verdicts

# Rows that are run where `fit` was not told how many make a batch.
_ROWS = 32


class Cause(NamedTuple):
    """Why steps are skipped: what kind of cause it is, and in words."""

    kind: str
    text: str


class BadData(NamedTuple):
    """The rows of the arrays given to `fit` that are not finite."""

    rows: frozenset[int]
    text: str

    @property
    def cause(self) -> Cause:
        """What is said of them."""
        return Cause("data", self.text)


def bad_data(data: Mapping[str, Any]) -> BadData:
    """Finds the rows of the arrays given to `fit` that are not finite."""
    found = _bad_rows.find(data)
    rows = frozenset(row for each in found for row in each.rows)
    text = f"{found[0].text}; drop or fix them" if found else ""
    return BadData(rows, text)


def without(
    data: Mapping[str, Any], rows: Collection[int]
) -> Mapping[str, Any]:
    """Leaves rows out of arrays; nothing is left where all are left out."""
    if not rows:
        return data
    drop = functools.partial(np.delete, obj=sorted(rows), axis=0)
    left = {
        name: tree.map_structure(lambda leaf: drop(np.asarray(leaf)), nest)
        for name, nest in data.items()
    }
    return left if all(map(len, tree.flatten(left))) else {}


def of_model(
    model: keras.Model,
    data: Mapping[str, Any],
    batch_size: int | None,
    loss: float,
    overflowed: Mapping[str, int],
) -> Cause:
    """Says where in the model it goes wrong, likeliest first.

    Args:
        model: The model that `fit` trains.
        data: Its arguments `x` and `y`, where these are arrays.
        batch_size: Rows of a batch.
        loss: What the epoch's logs say; NaN for unknown.
        overflowed: How often the gradient of each variable was not finite.
    """
    is_float16 = own_code.computes_in(model, "float16")
    largest = _formats.FLOAT16.max if is_float16 else math.inf
    bad = None
    if "x" in data:
        batch = _worst_rows(data, batch_size or _ROWS)
        measured, bad = _run(model, batch)
        loss = loss if math.isnan(measured) and not bad else measured
    if bad:
        return _of_layer(bad, data, largest)
    if abs(loss) > largest:
        reached = _largest(data.get("y"))
        targets = f", and targets reach {reached:.3g}" if reached else ""
        return Cause(
            "loss",
            f"the loss is {loss:.3g}, where float16 ends at {largest:g}"
            f"{targets}; standardise them: y = (y - y.mean()) / y.std()",
        )
    unread = "" if data else "look for rows of the data that are not finite; "
    worst = max(overflowed, key=overflowed.__getitem__, default="")
    if not worst or not overflowed[worst]:
        return Cause("unknown", unread + verdicts.CHECK)
    return Cause(
        "gradient",
        f"{unread}the gradient of {worst!r} overflows most often; keep its "
        'layer in `dtype="float32"`, clip, or lower the learning rate',
    )


class _Bad(NamedTuple):
    """The first layer that returns what is not finite."""

    layer: str
    is_given_finite: bool


def _of_layer(bad: _Bad, data: Mapping[str, Any], largest: float) -> Cause:
    reached, targets = _largest(data["x"]), _largest(data.get("y"))
    if reached > largest and not bad.is_given_finite:
        return Cause(
            "x",
            _bad_rows.beyond("`x`", reached, "float16", largest)
            + "; scale it, or use 'mixed_bfloat16'",
        )
    where = ""
    if targets > largest:
        where = f"targets reach {targets:.3g}, float16 ends at {largest:g}"
    finding = bad.layer, verdicts.FORWARD, verdicts.NOT_FINITE
    return Cause(f"layer {bad.layer}", verdicts.fault(*finding, where))


def arrays(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those arguments of `fit` that can be read again at any time."""
    return {
        name: nest
        for name, nest in given.items()
        if nest is not None and all(map(_is_array, tree.flatten(nest)))
    }


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray) or ops.is_tensor(leaf)


def _largest(nest: Any) -> float:
    tops = [
        float(np.abs(block).max(initial=0.0, where=np.isfinite(block)))
        for leaf in tree.flatten(nest)
        for _, block in _bad_rows.blocks(leaf)
    ]
    return max(tops, default=0.0)


def _worst_rows(data: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Returns a batch of those rows of `x` that hold the largest values."""
    first, *_ = tree.flatten(data["x"])
    tops = [np.abs(block).max(axis=1) for _, block in _bad_rows.blocks(first)]
    order = np.argsort(-np.concatenate(tops), kind="stable") if tops else None
    rows = np.arange(first.shape[0]) if order is None else order
    kept = np.sort(rows[:count])
    take = functools.partial(np.take, indices=kept, axis=0)
    return {
        name: tree.map_structure(lambda leaf: take(np.asarray(leaf)), nest)
        for name, nest in data.items()
    }


def _run(
    model: keras.Model, batch: Mapping[str, Any]
) -> tuple[float, _Bad | None]:
    """Returns the loss of a batch, and the first layer that is not finite.

    NaN and `None` if it cannot be run. No variable of the model is written.
    """
    bad: list[_Bad] = []

    def on_call(call: probe.Call) -> Any:
        outputs = call.proceed()
        if not bad and not probe.is_finite(outputs):
            bad.append(_Bad(call.target.name, probe.is_finite(call.tensors)))
        return outputs

    x, y, weight = (batch.get(name) for name in ("x", "y", "sample_weight"))
    try:
        watched = probe.watched(probe.targets(model), on_call)
        with keras.StatelessScope(), watched:
            x = tree.map_structure(ops.convert_to_tensor, x)
            outputs = layers.call_in_training(model, x)
            loss = layers.compute_loss(
                model, x=x, y=y, y_pred=outputs, sample_weight=weight
            )
            return float(loss), next(iter(bad), None)
    except Exception:
        # A step of the user's own may call the model otherwise.
        return math.nan, next(iter(bad), None)
