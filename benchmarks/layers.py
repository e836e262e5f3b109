"""Sweeps every layer and activation of Keras in 16 bit against float32.

    python -m benchmarks.layers [--part=layers,ops] [--only=NAME,...]
        [--format=float16,bfloat16] [--json] [--save=docs]

`layers` shows the layers that exceed a bound in Keras or in tfmix, side by
side. `ops` shows the effect of op rules on single ops.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from benchmarks import (
    layer_deviation,
    layer_measure,
    layer_ops,
    layer_recipes,
    results,
)

# This scale is smaller than tfmix's initial scale.
LOSS_SCALE = 2.0**12
SATURATED_ATTENTION = (
    "rounded queries and keys decide a saturated softmax differently"
)
SATURATED_GATE = (
    "the gradient of a saturated gate follows the rounding of its 16-bit sum"
)
UNSCALED = (
    "gradients below float16's smallest number, which a loss scale brings back"
)

# The layers that exceed the bounds under tfmix, by labels of recipes.
# `docs/what-stays-float32.md` has the same list, and a test compares the two.
EXCEPTIONS: dict[str, str] = {
    "GroupQueryAttention": SATURATED_ATTENTION,
    "GroupQueryAttention(dropout=0.1)": SATURATED_ATTENTION,
    "MultiHeadAttention": SATURATED_ATTENTION,
    "MultiHeadAttention(dropout=0.1)": SATURATED_ATTENTION,
    "Bidirectional": UNSCALED,
    "ConvLSTM3D": SATURATED_GATE,
    "GRUCell": SATURATED_GATE,
    "LSTMCell": SATURATED_GATE,
    "SimpleRNNCell": SATURATED_GATE,
}


def reason(name: str, deviation: layer_deviation.Deviation) -> str | None:
    """Returns the known reason for an inaccuracy, None if there is none.

    Nothing excuses NaN, infinity or an error.
    """
    if deviation.not_finite or deviation.error:
        return None
    return EXCEPTIONS.get(name)


@dataclasses.dataclass(frozen=True)
class Row:
    """One layer in one format on one kind of input.

    Attributes:
        name: The recipe's label, such as `activations.relu` for activations.
        fmt: `"float16"` or `"bfloat16"`.
        kind: A key of `layer_measure.KINDS`.
        keras: Keras's deviation from float32.
        tfmix: The same under tfmix's default policy.
        rounded: If tfmix is inaccurate, the deviation of float32 itself on
            inputs and weights rounded to 16 bit.
        scaled: If tfmix is inaccurate, its deviation with the loss scaled by
            `LOSS_SCALE`.
    """

    name: str
    fmt: str
    kind: str
    keras: layer_deviation.Deviation
    tfmix: layer_deviation.Deviation
    rounded: layer_deviation.Deviation | None = None
    scaled: layer_deviation.Deviation | None = None

    @property
    def bound(self) -> float:
        """The allowed error, in units of the format's epsilon."""
        return layer_deviation.BOUNDS[self.fmt]

    @property
    def is_interesting(self) -> bool:
        """True if Keras or tfmix exceeds the bound."""
        both = (self.keras, self.tfmix)
        return not all(d.is_within(self.bound) for d in both)

    @property
    def is_unexplained(self) -> bool:
        """True if tfmix exceeds the bound without a reason.

        The docs must name the reason, and a measurement must show the reason
        for an inaccuracy: see `proof`.
        """
        if self.tfmix.is_within(self.bound):
            return False
        if self.rounded is not None and not self.proof:
            return True
        return reason(self.name, self.tfmix) is None

    @property
    def proof(self) -> str:
        """The measurement that shows the reason, `""` without one.

        Either float32 itself exceeds the bound if its inputs and weights are
        rounded, or tfmix does not if the loss is scaled.
        """
        if self.rounded and not self.rounded.is_within(self.bound):
            return f"float32 on rounded inputs and weights: {self.rounded}"
        if self.scaled and self.scaled.is_within(self.bound):
            return f"with a loss scale of {LOSS_SCALE:g}: {self.scaled}"
        return ""


def recipes() -> dict[str, layer_recipes.Recipe]:
    """Returns all recipes by their printed name."""
    activations = layer_recipes.activation_recipes()
    return {
        **layer_recipes.layer_recipes(),
        **{f"activations.{name}": r for name, r in activations.items()},
    }


def sweep(
    names: Iterable[str], formats: Sequence[str], kinds: Sequence[str]
) -> Iterator[Row]:
    """Measures recipes one by one.

    Args:
        names: Keys of `recipes()`.
        formats: Some of `layer_deviation.BOUNDS`.
        kinds: Some of `layer_measure.KINDS`.

    Yields:
        A row for each combination.
    """
    known = recipes()
    for name in names:
        runs = layer_measure.Runs(known[name])
        for fmt in formats:
            for kind in kinds:
                found = runs.deviations(fmt, kind)
                if found["tfmix"].epsilons > layer_deviation.BOUNDS[fmt]:
                    found["rounded"] = runs.rounded(fmt, kind)
                    again = layer_measure.Runs(known[name], LOSS_SCALE)
                    found["scaled"] = again.deviations(fmt, kind)["tfmix"]
                yield Row(name, fmt, kind, **found)


def table(rows: Sequence[Row]) -> results.Table:
    """Returns the interesting rows, with Keras and tfmix side by side."""
    shown = [_cells(row) for row in rows if row.is_interesting]
    return results.Table("Out of line", shown, f"{summary(rows)}.")


_UNEXPLAINED = "unexplained"


def _cells(row: Row) -> dict[str, str]:
    why = ""
    if not row.tfmix.is_within(row.bound):
        why = reason(row.name, row.tfmix) or ""
    return {
        "layer": row.name,
        "format": row.fmt,
        "input": row.kind,
        "Keras": str(row.keras),
        "tfmix": str(row.tfmix),
        "shown by": row.proof,
        "why": _UNEXPLAINED if row.is_unexplained else why,
    }


def summary(rows: Sequence[Row]) -> str:
    """Returns a line with the numbers of rows that exceed the bound."""
    keras_out = sum(not row.keras.is_within(row.bound) for row in rows)
    tfmix_out = sum(not row.tfmix.is_within(row.bound) for row in rows)
    unexplained = sum(row.is_unexplained for row in rows)
    return (
        f"{len(rows)} measurements: Keras out of line in {keras_out}, tfmix "
        f"in {tfmix_out}, of which {unexplained} are not explained in "
        "docs/what-stays-float32.md"
    )


FLAGS = results.flag_values()
results.add_names(
    FLAGS,
    "only",
    recipes(),
    [],
    "layers as printed, activations as `activations.relu`",
)
_FORMATS = sorted(layer_deviation.BOUNDS)
results.add_names(FLAGS, "format", _FORMATS, _FORMATS, "16-bit formats")
_HOW = "seed 11"
_PARTS = ("layers", "ops")
results.add_names(FLAGS, "part", _PARTS, _PARTS, "what to measure")


def main(words: Sequence[str] | None = None) -> int:
    """Runs the sweep; exit code 1 if tfmix has an unexplained row."""
    results.parse(FLAGS, words)
    found: list[results.Table] = []
    if "layers" in FLAGS.part:
        names = results.track(FLAGS.only or recipes(), "layers")
        rows = sweep(names, FLAGS.format, list(layer_measure.KINDS))
        found = results.measure(
            "layers", FLAGS, lambda: [table([*rows])], _HOW, words=words
        )
    if "ops" in FLAGS.part and not FLAGS.only:
        ops = layer_ops.measure(results.track(layer_ops.CASES, "ops"))
        results.measure(
            "layers/ops",
            FLAGS,
            lambda: [layer_ops.table(ops)],
            _HOW,
            words=words,
        )
    return int(
        any(row["why"] == _UNEXPLAINED for each in found for row in each.rows)
    )


if __name__ == "__main__":
    results.start(main, FLAGS)
