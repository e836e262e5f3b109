"""Keras keeps the graph of a model's layers like this."""

import keras

from tests._keras.contracts import (
    batch,
    dense,
    functional,
)
from tfmix._keras import layers


def test_a_graph_runs_in_parts_by_the_results_they_reach():
    start = keras.Input((4,))
    twice, once = dense(), dense()
    first = twice(start)
    second = twice(once(first))
    model = keras.Model(start, [first, second])
    trunk, head = layers.graph_parts(model)
    (begin,), (middle, end) = model.inputs, model.outputs
    assert trunk[1:] == ([id(begin)], [id(middle)])
    assert head[1:] == ([id(middle)], [id(end)])
    assert [node.operation for node in head[0]] == [once, twice]
    values = {id(begin): batch(2, 4)}
    for nodes, _, _ in (trunk, head):
        for node in nodes:
            values.update(layers.run_node(node, values, lambda call: call))
    found = [values[id(begin)], values[id(end)]]
    assert keras.ops.all(found[1] == model(found[0])[1])
    packed = layers.packed_results(model, found)
    assert packed == found
    assert len(layers.graph_parts(functional())) == 1
