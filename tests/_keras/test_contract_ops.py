"""Keras's ops and attention look up their functions like this."""

import importlib
import inspect
import types

import keras
import pytest

from tests._keras.contracts import OPS, attention, batch, check_takes, spy
from tfmix._keras import op_places


def replaced_op(monkeypatch, owner, name):
    """Makes a Keras function return the constant 7 wherever it is called."""
    seven = keras.ops.full((2, 3, 4), 7.0)
    return spy(monkeypatch, owner, name, result=lambda *_: seven)


@pytest.mark.parametrize(
    ("theme", "name"),
    [
        ("numpy", "tanh"),
        ("nn", "gelu"),
        ("math", "erf"),
    ],
)
def test_an_op_looks_its_function_up_at_each_call(monkeypatch, theme, name):
    start = keras.Input((3, 4))
    op = getattr(keras.ops, name)
    model = keras.Model(start, op(start))
    module = getattr(op_places.BACKEND_OPS, theme)
    before = float(op(batch())[0, 0, 0])
    calls = replaced_op(monkeypatch, module, name)
    assert before != 7.0
    # It holds eagerly, and for the `Operation` in a graph.
    assert float(op(batch())[0, 0, 0]) == 7.0
    assert float(model(batch())[0, 0, 0]) == 7.0
    assert len(calls) == 2


def test_an_activation_and_a_layer_look_the_function_up_too(monkeypatch):
    layer = keras.layers.Activation("gelu")
    module = op_places.BACKEND_OPS.nn
    calls = replaced_op(monkeypatch, module, "gelu")
    keras.activations.gelu(batch())
    layer(batch())
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("theme", "name", "op"),
    [
        ("linalg", "det", keras.ops.det),
        ("numpy", "sin", keras.ops.sin),
        ("nn", "gelu", keras.activations.gelu),
        ("math", "erf", keras.ops.erf),
        ("image", "rgb_to_hsv", keras.ops.image.rgb_to_hsv),
        ("core", "cast", lambda x: keras.ops.cast(x, "float16")),
        ("core", "convert_to_tensor", keras.ops.convert_to_tensor),
    ],
)
def test_an_op_is_reached_through_the_name_of_its_module(
    monkeypatch, theme, name, op
):
    x = keras.ops.ones((3, 3, 3))
    stand_in = types.SimpleNamespace(**{name: lambda *args, **kwargs: "ours"})
    ((package, attribute),) = op_places.targets(name)
    assert attribute == theme
    monkeypatch.setattr(package, theme, stand_in)
    assert op(x) == "ours"


@pytest.mark.parametrize("theme", ["linalg", "numpy", "nn", "math", "image"])
def test_the_ops_of_a_theme_are_in_a_module_of_that_name(theme):
    for package in op_places.BACKEND_OPS, importlib.import_module(OPS):
        module = getattr(package, theme)
        assert inspect.ismodule(module)
        assert any(
            inspect.isfunction(value) and value.__module__ == module.__name__
            for value in vars(module).values()
        )


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


ATTENTION_LAYERS = ["MultiHeadAttention", "GroupQueryAttention"]


@pytest.mark.parametrize("name", ATTENTION_LAYERS)
def test_attention_without_scores_calls_the_op(monkeypatch, name):
    layer = attention(name)
    module = op_places.BACKEND_OPS.nn
    calls = spy(monkeypatch, module, "dot_product_attention")
    layer(batch(), batch())
    assert len(calls) == 1


@pytest.mark.parametrize("name", ATTENTION_LAYERS)
def test_attention_with_scores_calls_compute_attention(monkeypatch, name):
    layer = attention(name)
    module = op_places.BACKEND_OPS.nn
    op = spy(monkeypatch, module, "dot_product_attention")
    methods = spy(monkeypatch, type(layer), "_compute_attention")
    softmaxes = spy(monkeypatch, layer._softmax, "call")
    layer(batch(), batch(), return_attention_scores=True)
    assert len(methods) == len(softmaxes) == 1
    assert not op
    # Its first argument is the layer, which knows the requested outputs.
    assert methods[0][1] is layer
    if name == "GroupQueryAttention":
        assert layer._return_attention_scores is True


@pytest.mark.parametrize("name", ATTENTION_LAYERS)
def test_attention_with_dropout_does_not_call_the_op(monkeypatch, name):
    layer = attention(name)
    module = op_places.BACKEND_OPS.nn
    op = spy(monkeypatch, module, "dot_product_attention")
    dropout = "_dropout" if hasattr(layer, "_dropout") else "dropout"
    monkeypatch.setitem(vars(layer), dropout, 0.5)
    layer(batch(), batch())
    assert not op
