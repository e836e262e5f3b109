"""Measures the gain of running ops in float32.

`python -m benchmarks.layers --part ops` runs every candidate on 16-bit input
twice, in plain Keras and under an op rule, and compares outputs and gradients
with float32. Every op with a gain is on a list of `tfmix.policy.op_lists`.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np

from benchmarks import layer_deviation, layer_measure, results
from tfmix.autocast import global_policy
from tfmix.policy import op_lists
from tfmix.policy import policy as policies

# A rule must make the error this many times smaller. Rounding the result leaves
# half an epsilon, so 4 means that plain Keras is at least 2 epsilons off. Graph
# mode runs a CPU's kernels, which add up in 16 bit although accelerators do
# not, so it needs a larger gain.
WORTH = {"XLA": 4.0, "graph": 16.0}
ROUNDING = 0.5
# An offset of 5 saturates activations, but leaves some gradient.
KINDS = {**layer_measure.KINDS, "offset by 5": lambda n: 5.0 + n}

Draw = Callable[[np.random.Generator, str], list[np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Case:
    """The call of one op, and its inputs.

    Attributes:
        call: Function of the op and its tensors.
        draw: Function that returns the arrays of one kind of input.
        kinds: The kinds of input that make sense for the op.
    """

    call: Callable[..., Any]
    draw: Draw
    kinds: tuple[str, ...] = tuple(KINDS)


@dataclasses.dataclass(frozen=True)
class Row:
    """One op in one format on one kind of input.

    Attributes:
        name: The op's name.
        mode: `"graph"` or `"XLA"`.
        fmt: `"float16"` or `"bfloat16"`.
        kind: A key of `KINDS`.
        keras: The deviation of plain Keras from float32.
        ruled: The same under an op rule.
    """

    name: str
    mode: str
    fmt: str
    kind: str
    keras: layer_deviation.Deviation
    ruled: layer_deviation.Deviation

    @property
    def gain(self) -> float:
        """The error without the rule over the error with it.

        It is infinite if plain Keras raises an error or returns fewer finite
        numbers, and zero if the rule does.
        """
        failures = [(bool(d.error), d.not_finite) for d in self._sides]
        if failures[0] != failures[1]:
            return math.inf if failures[0] > failures[1] else 0.0
        alone, ruled = (d.epsilons for d in self._sides)
        return alone / max(ruled, ROUNDING)

    @property
    def is_worth_it(self) -> bool:
        """True if this row is a reason to list the op."""
        return self.gain >= WORTH[self.mode]

    @property
    def effect(self) -> str:
        """The effect of the rule, as a word or a number."""
        if self.gain < math.inf:
            return f"error / {self.gain:.1f}"
        return "runs" if self.keras.error else "finite"

    @property
    def _sides(self) -> tuple[layer_deviation.Deviation, ...]:
        return self.keras, self.ruled


def _drawing(*shapes: tuple[int, ...], positive: bool = False) -> Draw:
    def draw(rng: np.random.Generator, kind: str) -> list[np.ndarray]:
        arrays = [KINDS[kind](rng.normal(size=shape)) for shape in shapes]
        return [np.abs(a) + 0.01 for a in arrays] if positive else arrays

    return draw


def _definite(rng: np.random.Generator, kind: str) -> list[np.ndarray]:
    """A positive definite matrix, and a right-hand side."""
    matrix = rng.normal(size=(8, 8))
    return [matrix @ matrix.T + 8 * np.eye(8), rng.normal(size=(8, 4))]


def _near_one(rng: np.random.Generator, kind: str) -> list[np.ndarray]:
    """Factors whose product stays inside the range."""
    return [1 + 0.1 * rng.normal(size=(16, 64))]


def _inside_unit(rng: np.random.Generator, kind: str) -> list[np.ndarray]:
    return [rng.uniform(-0.99, 0.99, size=(8, 512))]


def _probabilities(rng: np.random.Generator, kind: str) -> list[np.ndarray]:
    """Confident probabilities, and a target of the same shape."""
    logits = 6 * rng.normal(size=(64, 10))
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    target = np.eye(10)[rng.integers(0, 10, size=64)]
    return [powers / powers.sum(-1, keepdims=True), target]


def _plain(op: Any, x: Any) -> Any:
    return op(x)


def _rows(op: Any, x: Any) -> Any:
    return op(x, axis=-1)


def _pair(op: Any, x: Any, y: Any) -> Any:
    return op(x, y)


_ELEMENTS, _LONG, _SERIES = (8, 512), (4, 4096), (2, 4096, 8)
_NORMAL = ("normal",)
# With larger inputs, the result itself would leave float16's range.
_IN_RANGE = ("normal", "offset by 5")
_EXPONENTIALS = ("exp", "exp2", "expm1", "sinh", "cosh")
_ACTIVATIONS = (
    *("softplus", "squareplus", "tanh", "sigmoid", "softsign", "selu"),
    *("hard_sigmoid", "sparse_sigmoid", "hard_silu"),
)
_LOGARITHMS = ("log", "log10", "log1p", "log2")
_SUMS = (
    *("sum", "mean", "average", "var", "std", "cumsum", "norm"),
    *("nansum", "nanmean", "nanvar", "nanstd", "nancumsum"),
)
_ROWS = ("normalize", "softmax", "log_softmax", "sparsemax", "logsumexp")
_NORMALISERS = ("rms_normalization", "layer_normalization")
_PRODUCTS = ("prod", "cumprod", "nanprod", "nancumprod")
_MATRIX = ("cholesky", "det", "eigh", "inv", "qr", "slogdet", "svd")
_SYSTEMS = ("lstsq", "solve", "solve_triangular")

CASES: dict[str, Case] = {
    **dict.fromkeys(
        _EXPONENTIALS, Case(_plain, _drawing(_ELEMENTS), _IN_RANGE)
    ),
    **dict.fromkeys(_ACTIVATIONS, Case(_plain, _drawing(_ELEMENTS))),
    **dict.fromkeys(
        _LOGARITHMS, Case(_plain, _drawing(_ELEMENTS, positive=True))
    ),
    **dict.fromkeys(
        _SUMS, Case(lambda op, x: op(x, axis=1), _drawing(_SERIES))
    ),
    **dict.fromkeys(_ROWS, Case(_rows, _drawing(_LONG))),
    **dict.fromkeys(_NORMALISERS, Case(_plain, _drawing(_LONG))),
    **dict.fromkeys(_PRODUCTS, Case(_rows, _near_one, _NORMAL)),
    **dict.fromkeys(
        ("logaddexp", "logaddexp2"), Case(_pair, _drawing(_ELEMENTS, _ELEMENTS))
    ),
    **dict.fromkeys(_MATRIX, Case(lambda op, x, _: op(x), _definite, _NORMAL)),
    **dict.fromkeys(_SYSTEMS, Case(_pair, _definite, _NORMAL)),
    "solve_triangular": Case(
        lambda op, a, b: op(a, b, lower=True), _definite, _NORMAL
    ),
    "erfinv": Case(_plain, _inside_unit, _NORMAL),
    "power": Case(lambda op, x: op(x, 3), _drawing(_ELEMENTS), _IN_RANGE),
    "cdist": Case(_pair, _drawing((16, 1024), (16, 1024))),
    "trace": Case(_plain, _drawing((1024, 1024))),
    "corrcoef": Case(_plain, _drawing((8, 4096))),
    "segment_sum": Case(
        lambda op, x: op(x, np.arange(len(x)) % 2, num_segments=2),
        _drawing((4096, 4)),
    ),
    "average_pool": Case(
        lambda op, x: op(x, 1024, 1024, data_format="channels_last"),
        _drawing((2, 4096, 4)),
    ),
    "adaptive_average_pool": Case(
        lambda op, x: op(x, 4, data_format="channels_last"),
        _drawing((2, 4096, 4)),
    ),
    "dot_product_attention": Case(
        lambda op, x: op(x, x, x), _drawing((2, 32, 4, 64))
    ),
    **dict.fromkeys(
        ("categorical_crossentropy", "binary_crossentropy"),
        Case(lambda op, p, y: op(y, p), _probabilities, _NORMAL),
    ),
    "sparse_categorical_crossentropy": Case(
        lambda op, p, y: op(keras.ops.argmax(y, -1), p),
        _probabilities,
        _NORMAL,
    ),
    "psnr": Case(
        lambda op, x, y: op(x, y, 1.0),
        _drawing(_LONG, _LONG),
        ("normal", "scaled by 200"),
    ),
}


def modes() -> tuple[str, ...]:
    """Returns the modes of the current backend; JAX only compiles."""
    return ("XLA",) if keras.backend.backend() == "jax" else ("graph", "XLA")


def measure(
    names: Iterable[str],
    formats: Iterable[str] = tuple(layer_deviation.BOUNDS),
) -> Iterator[Row]:
    """Measures ops one by one.

    Args:
        names: Some of `CASES`.
        formats: 16-bit formats. Defaults to both.

    Yields:
        A row for each mode, format and kind of input, if the op can run in
        float32.
    """
    for name in names:
        op = getattr(keras.ops, name, None) or getattr(keras.activations, name)
        for mode in modes():
            for fmt in formats:
                try:
                    yield from _measure_one(name, op, mode, fmt)
                except Exception:
                    # Some ops, `corrcoef` in a graph, fail in float32 as well.
                    continue


def _measure_one(name: str, op: Any, mode: str, fmt: str) -> Iterator[Row]:
    case = CASES[name]
    ruled = policies.Policy(
        f"mixed_{fmt}", float32_layers=[], float32_ops=[name]
    )
    # All kinds of input share the trace of the first.
    wide, narrow, inside = (_compiled(case, op, mode) for _ in range(3))
    for kind in case.kinds:
        rng = np.random.default_rng(11)
        inputs = [layer_measure.rounded(a, fmt) for a in case.draw(rng, kind)]
        reference = _run(wide, inputs, "float32")
        sides = []
        for function, scope in (
            (narrow, layer_measure.keras_policy(f"mixed_{fmt}")),
            (inside, global_policy.policy_scope(ruled)),
        ):
            with scope:
                sides.append(_deviation(function, inputs, fmt, reference))
        yield Row(name, mode, fmt, kind, *sides)


def _compiled(case: Case, op: Any, mode: str) -> layer_measure.Gradients:
    def call(tensors: Any) -> Any:
        return case.call(op, *tensors)

    if keras.backend.backend() == "jax":
        return layer_measure.with_jax(call, [], [], 1.0)
    import tensorflow as tf

    gradients = layer_measure.with_tape(call, [], 1.0)
    return tf.function(gradients, jit_compile=mode == "XLA")


def _run(
    function: layer_measure.Gradients, inputs: list[np.ndarray], dtype: str
) -> dict[str, np.ndarray]:
    return layer_measure.named(function(layer_measure.cast_all(inputs, dtype)))


def _deviation(
    function: layer_measure.Gradients,
    inputs: list[np.ndarray],
    fmt: str,
    reference: dict[str, np.ndarray],
) -> layer_deviation.Deviation:
    try:
        actual = _run(function, inputs, fmt)
    except Exception as error:
        # Missing kernels raise all kinds of errors.
        return layer_deviation.Deviation(error=type(error).__name__)
    return layer_deviation.compare(actual, reference, fmt)


def table(rows: Iterable[Row]) -> results.Table:
    """Returns a row for each op, with the largest effect of a rule."""
    best: dict[str, Row] = {}
    for row in rows:
        known = best.setdefault(row.name, row)
        if _weight(row) > _weight(known):
            best[row.name] = row
    lines = [
        {
            "op": row.name,
            "on": f"{row.fmt}, {row.kind}, {row.mode}",
            "Keras": str(row.keras),
            "with a rule": str(row.ruled),
            "effect": row.effect,
            "worth it": row.is_worth_it,
            "on the list": row.name in op_lists.DEFAULT_FLOAT32_OPS,
        }
        for row in sorted(best.values(), key=_weight, reverse=True)
    ]
    note = (
        "For each op the input on which a rule changes most. A rule is worth "
        "it if the op runs, is finite, or is 4 times more accurate under XLA, "
        "16 times in graph mode, under this backend or the other."
    )
    return results.Table("Ops in 16 bit, alone and under a rule", lines, note)


def _weight(row: Row) -> tuple[float, float]:
    return row.gain / WORTH[row.mode], row.keras.epsilons
