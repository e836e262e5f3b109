"""Keras's ops and attention look up their functions like this."""

import importlib

import keras
import pytest

from tests._keras.contracts import OPS, attention, batch, check_takes, spy
from tfmix._keras import op_places


def test_a_composed_op_works_in_its_underscored_function(monkeypatch):
    start = keras.Input((3, 4))
    model = keras.Model(start, keras.ops.normalize(start))
    nn = importlib.import_module(OPS).nn
    check_takes(nn._normalize, "x axis order epsilon")
    calls = spy(monkeypatch, nn, "_normalize")
    keras.ops.normalize(batch())
    model(batch())
    assert len(calls) == 2


def test_a_class_of_activations_works_in_static_call(monkeypatch):
    module = importlib.import_module("keras.src.activations.activations")
    (found,) = (c for name, c in vars(module).items() if name == "Mish")
    raw = vars(found)["static_call"]
    assert isinstance(raw, staticmethod)
    calls = []

    def ours(x):
        calls.append(x)
        return raw.__func__(x)

    monkeypatch.setattr(found, "static_call", staticmethod(ours))
    keras.activations.mish(batch())
    keras.layers.Activation("mish")(batch())
    assert len(calls) == 2


@pytest.mark.parametrize("name", ["MultiHeadAttention", "GroupQueryAttention"])
def test_attention_calls_the_op_unless_there_are_scores_or_dropout(
    monkeypatch, name
):
    layer = attention(name)
    op = spy(monkeypatch, op_places.BACKEND_OPS.nn, "dot_product_attention")
    methods = spy(monkeypatch, type(layer), "_compute_attention")
    softmaxes = spy(monkeypatch, layer._softmax, "call")
    layer(batch(), batch())
    assert (len(op), len(softmaxes)) == (1, 0)
    methods.clear()
    layer(batch(), batch(), return_attention_scores=True)
    assert (len(op), len(methods), len(softmaxes)) == (1, 1, 1)
    # Its first argument is the layer, which knows the requested outputs.
    assert methods[0][1] is layer
    if name == "GroupQueryAttention":
        assert layer._return_attention_scores is True
    dropout = "_dropout" if hasattr(layer, "_dropout") else "dropout"
    monkeypatch.setitem(vars(layer), dropout, 0.5)
    layer(batch(), batch())
    assert len(op) == 1
