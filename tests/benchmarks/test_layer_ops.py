"""The measurement of op rules: its verdicts and its table."""

import math

import keras
import pytest

from benchmarks import layer_deviation, layer_ops
from tests import helpers

Deviation = layer_deviation.Deviation


def row(alone, ruled, mode="XLA"):
    return layer_ops.Row("sum", mode, "float16", "normal", alone, ruled)


@pytest.mark.parametrize(
    ("alone", "ruled", "gain", "effect"),
    [
        (Deviation(8.0), Deviation(1.0), 8.0, "error / 8.0"),
        # A rounded result cannot be better than half an epsilon.
        (Deviation(0.5), Deviation(0.1), 1.0, "error / 1.0"),
        (Deviation(0.1, 3), Deviation(2.0), math.inf, "finite"),
        (Deviation(error="TypeError"), Deviation(2.0), math.inf, "runs"),
        (Deviation(2.0), Deviation(2.0, 1), 0.0, "error / 0.0"),
    ],
)
def test_a_gain_is_accuracy_or_running_at_all(alone, ruled, gain, effect):
    assert row(alone, ruled).gain == gain
    assert row(alone, ruled).effect == effect


def test_graph_mode_needs_a_larger_gain():
    sides = Deviation(4.0), Deviation(0.5)
    assert row(*sides).is_worth_it
    assert not row(*sides, "graph").is_worth_it


def test_a_rule_fixes_an_op_that_overflows_inside():
    rows = list(layer_ops.measure(["squareplus"], ["float16"]))
    assert len(rows) == len(layer_ops.KINDS) * len(layer_ops.modes())
    finite = {r.kind for r in rows if r.effect == "finite"}
    assert finite == {"scaled by 200"}
    (line,) = layer_ops.table(rows).rows
    assert (line["op"], line["effect"]) == ("squareplus", "finite")
    assert line["worth it"]


@helpers.requires_backend("tensorflow")
def test_an_op_alone_runs_as_in_plain_keras():
    # Under an empty list of rules, tfmix would still sum in float32.
    rows = layer_ops.measure(["sum"], ["float16"])
    assert any(r.keras.epsilons > 4 > 4 * r.ruled.epsilons for r in rows)


@pytest.mark.slow
@pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="takes minutes each"
)
@pytest.mark.parametrize("name", ["exp", "log_softmax", "mean", "var"])
def test_an_omitted_op_is_not_worth_a_rule(name):
    assert not any(row.is_worth_it for row in layer_ops.measure([name]))
