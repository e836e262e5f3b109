"""The benchmark of growth: sizes, counts of operations, rows."""

import numpy as np
import pytest

from benchmarks import resident, scale
from tests import helpers

pytestmark = helpers.requires_backend("tensorflow")


@pytest.fixture
def steps():
    """The module that needs TensorFlow."""
    from benchmarks import scale_steps

    return scale_steps


@pytest.mark.parametrize(
    "size",
    [*scale.BY_VARIABLES.values(), *scale.BY_PARAMETERS.values()],
)
def test_shapes_hold_what_they_say(steps, size):
    count, parameters = size
    shapes = steps.shapes(count, parameters)
    assert len(shapes) == count
    total = sum(int(np.prod(shape)) for shape in shapes)
    assert 0.7 < total / parameters < 1.4


def test_the_unlike_model_has_no_shape_twice(steps):
    shapes = steps.different_shapes(500, 10**6)
    assert len(set(shapes)) == len(shapes) == 500
    total = sum(int(np.prod(shape)) for shape in shapes)
    assert 0.9 < total / 10**6 < 1.1


def test_the_sizes_span_what_was_asked_for():
    counts = [count for count, _ in scale.BY_VARIABLES.values()]
    totals = [total for _, total in scale.BY_PARAMETERS.values()]
    assert (min(counts), max(counts)) == (10, 5000)
    assert (min(totals), max(totals)) == (10**5, 10**8)
    assert scale.REPLICAS == (1, 2, 4, 8)


def test_operations_in_branches_are_counted(steps):
    import tensorflow as tf

    @tf.function(autograph=False)
    def branching(x):
        return tf.cond(x > 0, lambda: tf.sin(tf.cos(x)), lambda: tf.exp(x))

    graph = branching.get_concrete_function(tf.TensorSpec(())).graph
    found = steps.operations(graph)
    assert {"Sin", "Cos", "Exp"} <= set(found)
    assert len(found) > len(graph.as_graph_def().node)


def test_a_row_compares_with_the_bare_optimizer(steps):
    made = steps.prepared(steps.shapes(2, 50))
    rows = scale.system_rows("2", made, runs=2)
    assert [row["system"] for row in rows] == list(scale.SYSTEMS)
    bare, keras_row, ours = rows
    assert bare["ratio"] is None
    for row in (keras_row, ours):
        assert row["added"] == row["operations"] - bare["operations"] > 0
        assert row["ratio"]["runs"] == 2


def test_a_peak_is_at_least_what_was_filled():
    with resident.Peak() as peak:
        filled = np.ones(2**22)
    assert peak.megabytes > 0.9 * filled.nbytes / 2**20


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [("--replicas", "2", "--runs", "1"), ("--peak", "tfmix", "1e5")]
)
def test_what_runs_in_a_process_of_its_own_answers(words):
    answer = scale._in_own_process(*words)
    if words[0] == "--replicas":
        assert [row["number"] for row in answer] == ["2"] * 3
    else:
        assert answer > 0
