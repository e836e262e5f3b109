"""Keras's optimizers know their variables and apply gradients like this."""

import keras
import pytest

from tests._keras.contracts import (
    ready,
    tensorflow_only,
)


def ones():
    return [keras.ops.ones((1,)), keras.ops.ones((1,))]


def test_the_tracker_adds_only_variables_it_does_not_know():
    made, _ = ready()
    before = len(made._variables)
    known, unknown = keras.Variable([1.0]), keras.Variable([1.0])
    made._tracker.stored_ids["variables"].add(id(known))
    made.known, made.unknown = known, unknown
    assert len(made._variables) == before + 1
    assert made._variables[-1] is unknown


@tensorflow_only
def test_apply_sums_the_gradients_over_the_replicas_once():
    made, variables = ready()
    calls = []

    def double(pairs):
        calls.append(pairs)
        return [(2.0 * gradient, variable) for gradient, variable in pairs]

    vars(made)["_all_reduce_sum_gradients"] = double
    made.apply(ones(), variables)
    assert len(calls) == 1
    assert [pair[1] for pair in calls[0]] == [v.value for v in variables]
    # Its result is applied.
    assert float(variables[0].value[0]) == pytest.approx(0.8)


@tensorflow_only
def test_list_may_replace_the_sum_over_the_replicas():
    made, variables = ready()
    vars(made)["_all_reduce_sum_gradients"] = list
    made.apply(ones(), variables)
    assert float(variables[0].value[0]) == pytest.approx(0.9)
