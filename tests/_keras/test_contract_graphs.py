"""Keras keeps the graph of a model's layers like this."""

import keras

from tests._keras.contracts import (
    batch,
    dense,
    find,
    functional,
    sequential,
    spy,
)
from tfmix._keras import layers


def test_a_symbol_knows_the_operation_and_the_node_that_made_it():
    start = keras.Input((3, 4))
    layer = dense()
    first, second = layer(start), layer(layer(start))
    operation, node, place = second._keras_history
    assert operation is second._keras_history.operation is layer
    assert (node, place) == (2, 0)
    assert layer._inbound_nodes[0].outputs[0] is first
    assert layer._inbound_nodes[0].input_tensors == [start]
    assert layer._inbound_nodes[node].outputs == [second]


def test_a_functional_model_casts_to_the_dtypes_of_its_symbols():
    seen = []

    class Layer(keras.layers.Layer):
        def call(self, inputs):
            seen.append(keras.backend.standardize_dtype(inputs.dtype))
            return inputs

    start = keras.Input((4,), dtype="float16")
    model = keras.Model(start, Layer(autocast=False)(start))
    seen.clear()
    model(batch(2, 4))
    (symbol,) = model._inputs
    symbol.__dict__["_dtype"] = "float32"
    model(batch(2, 4))
    assert seen == ["float16", "float32"]
    # A saved model contains the layer's dtype.
    layer = symbol._keras_history.operation
    assert layer.get_config()["dtype"] == "float16"
    layer.__dict__["_dtype"] = "float32"
    assert layer.get_config()["dtype"] == "float32"


def test_the_structure_of_the_inputs_is_what_the_model_is_called_with():
    inputs = {name: keras.Input((4,), name=name) for name in ("a", "b")}
    model = keras.Model(inputs, inputs["a"] + inputs["b"])
    assert set(model._inputs_struct) == {"a", "b"}
    assert model._inputs == list(inputs.values())
    assert getattr(sequential(), "_inputs_struct", None) is None


def test_a_sequential_model_calls_the_functional_inside_it(monkeypatch):
    model = sequential()
    assert not hasattr(keras.Sequential([dense()]), "_inputs")
    calls = spy(monkeypatch, model._functional, "call")
    model(batch())
    assert len(calls) == 1
    functional_class = find("keras.src.models.functional.Functional")
    assert type(model._functional) is functional_class
    assert model._functional.outputs == model.outputs


def test_structures_are_known_by_the_call_of_their_class():
    functional_class = find("keras.src.models.functional.Functional")
    assert type(functional()).call is functional_class.call
    assert type(sequential()).call is keras.Sequential.call
    assert "call" in vars(keras.Sequential)
    assert functional().operations[-1].name.startswith("dense")


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


def test_one_result_is_one_part():
    assert len(layers.graph_parts(functional())) == 1
