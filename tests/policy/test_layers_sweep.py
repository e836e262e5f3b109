"""The sweep of all layers: tfmix is within the bounds, or has a reason."""

import functools
import inspect
from pathlib import Path

import keras
import numpy as np
import pytest

from benchmarks import (
    layer_deviation,
    layer_measure,
    layer_recipes,
    layers,
)
from tfmix.policy import float32_layers

DOCS = Path(__file__).parents[2] / "docs" / "what-stays-float32.md"
# Layers and activations for which Keras itself is wrong, one of each kind.
FAST = (
    ("UnitNormalization", "float16", "offset by 100"),
    ("Average", "bfloat16", "offset by 100"),
    ("GlobalAveragePooling1D(mask)", "float16", "offset by 100"),
    ("AveragePooling1D", "float16", "offset by 100"),
    ("Attention", "float16", "scaled by 200"),
    ("MultiHeadAttention", "float16", "scaled by 200"),
    ("SimpleRNN", "float16", "offset by 100"),
    ("Softmax(axis=(1, 2))", "bfloat16", "offset by 100"),
    ("activations.squareplus", "float16", "scaled by 200"),
    ("activations.hard_silu", "bfloat16", "normal"),
)
# Keras is only wrong under JAX here.
SOFTSIGN = ("activations.softsign", "float16", "offset by 100")
# Keras is right here, and tfmix must stay so.
ALSO_RIGHT = (
    ("Dense", "float16", "normal"),
    ("Conv2D", "bfloat16", "offset by 100"),
    ("LayerNormalization", "float16", "offset by 100"),
    ("BatchNormalization", "bfloat16", "scaled by 200"),
    ("Embedding", "float16", "normal"),
    ("activations.gelu", "bfloat16", "scaled by 200"),
)


@functools.cache
def measured(name, fmt, kind):
    (row,) = layers.sweep([name], [fmt], [kind])
    return row


# Under JAX each run compiles for 2 s, so there are fewer.
@pytest.mark.every_case("few of them run under JAX, which shares none")
@pytest.mark.parametrize(
    ("name", "fmt", "kind"),
    [*FAST, *ALSO_RIGHT]
    if keras.backend.backend() == "tensorflow"
    else [FAST[0], FAST[5], SOFTSIGN, ALSO_RIGHT[0]],
)
def test_tfmix_stays_within_the_bound_or_has_a_reason(name, fmt, kind):
    row = measured(name, fmt, kind)
    assert not row.is_unexplained, str(row.tfmix)


@pytest.mark.skipif(
    keras.backend.backend() != "tensorflow",
    reason="XLA sums float16 in float32 by itself on a CPU",
)
@pytest.mark.parametrize(("name", "fmt", "kind"), FAST)
def test_the_sweep_finds_errors_of_keras(name, fmt, kind):
    row = measured(name, fmt, kind)
    assert not row.keras.is_within(row.bound)
    assert row.is_interesting


@pytest.mark.slow
@pytest.mark.parametrize("name", list(layers.recipes()))
def test_every_layer_is_within_the_bound_or_explained(name):
    rows = list(
        layers.sweep([name], layer_deviation.BOUNDS, layer_measure.KINDS)
    )
    unexplained = [
        (row.fmt, row.kind, str(row.tfmix))
        for row in rows
        if row.is_unexplained
    ]
    assert unexplained == []


def test_every_layer_of_keras_is_swept_or_left_out_for_a_reason():
    swept = {
        getattr(keras.layers, layer_recipes.layer_name(label))
        for label in layer_recipes.layer_recipes()
    }
    forgotten = [
        name
        for name, value in vars(keras.layers).items()
        if inspect.isclass(value)
        and value not in swept
        and name not in layer_recipes.NOT_SWEPT
    ]
    assert forgotten == []


def test_every_activation_of_keras_is_swept():
    names = {n for n in dir(keras.activations) if n[0].islower()}
    helpers_ = {"deserialize", "get", "serialize"}
    assert set(layer_recipes.activation_recipes()) == names - helpers_


def test_every_exception_is_in_the_docs_with_its_reason():
    text = " ".join(DOCS.read_text().split())
    for label, why in layers.EXCEPTIONS.items():
        assert layer_recipes.layer_name(label) in text
        assert why in text


def test_every_default_layer_rule_is_in_the_docs():
    text = DOCS.read_text()
    missing = [
        name
        for name in float32_layers.DEFAULT_LAYERS
        # Users do not know the base classes of preprocessing layers.
        if not name.endswith("DataLayer") and f"`{name}`" not in text
    ]
    assert missing == []


def test_a_deviation_is_measured_in_epsilons_of_the_format():
    reference = {"output 0": np.array([1.0, -2.0])}
    off = {"output 0": np.array([1.0, -2.0 + 2.0**-8])}
    found = layer_deviation.compare(off, reference, "float16")
    # The error is 2**-8 at a largest value of 2, in steps of 2**-10.
    assert found.epsilons == 2.0
    assert found.worst == "output 0"
    assert found.is_within(2.0)
    assert not found.is_within(1.9)
