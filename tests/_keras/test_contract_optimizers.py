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
@pytest.mark.parametrize(("factor", "left"), [(1.0, 0.9), (2.0, 0.8)])
def test_apply_takes_what_sums_the_gradients_over_the_replicas(factor, left):
    made, variables = ready()
    calls = []

    def total(pairs):
        calls.append([variable for _, variable in pairs])
        return [(factor * gradient, variable) for gradient, variable in pairs]

    vars(made)["_all_reduce_sum_gradients"] = total
    made.apply(ones(), variables)
    assert calls == [[v.value for v in variables]]
    assert float(variables[0].value[0]) == pytest.approx(left)
