"""A conversion happens as a whole or not at all, keeps state, and is undone."""

import keras
import numpy as np
import pytest

import tfmix
from tests import helpers
from tfmix._keras import layers
from tfmix.autocast import record as mixed_model
from tfmix.conversion import convert, layer_changes
from tfmix.step import guard

X = np.random.default_rng(0).normal(size=(32, 6)).astype("float32")
Y = X[:, :1] * 0.5
# Tracing would take longer than a few eager steps of such a small model. JAX
# has to compile.
EAGERLY = keras.backend.backend() == "tensorflow"


def small_model():
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(5, activation="tanh", name="body"),
            keras.layers.Dense(1, name="head"),
        ]
    )


def adam():
    return keras.optimizers.AdamW(0.02, weight_decay=0.01)


def compiled(optimizer=None):
    model, optimizer = small_model(), optimizer or adam()
    model.compile(optimizer, "mse", jit_compile=False, run_eagerly=EAGERLY)
    return model


def losses(model, epochs=1):
    """Trains for two steps an epoch; returns the losses."""
    history = model.fit(
        X, Y, batch_size=16, epochs=epochs, shuffle=False, verbose=0
    )
    return history.history["loss"]


def body(model):
    return model.get_layer("body")


def assert_float32(model):
    for layer in model._flatten_layers():
        assert layer.compute_dtype == layer.variable_dtype == "float32"
    assert {v.dtype for v in model.variables if "seed" not in v.path} == {
        "float32"
    }


STAGES = [
    (layers, "set_policy", 2),
    (layer_changes, "_set_spec", 2),
    (mixed_model, "set_policy", 1),
    (mixed_model, "choose", 1),
    (layers, "adopt_optimizer", 1),
    (guard, "attach", 1),
    (layer_changes, "forget_compiled", 1),
]


@pytest.mark.costly
@pytest.mark.parametrize(
    ("module", "name", "call"), STAGES, ids=[stage[1] for stage in STAGES]
)
def test_a_conversion_that_fails_leaves_the_model_as_it_was(
    monkeypatch, module, name, call
):
    model, twin = compiled(), compiled()
    twin.set_weights(model.get_weights())
    for each in (model, twin):
        losses(each)
    optimizer = model.optimizer
    attributes = {id(x): dict(vars(x)) for x in model._flatten_layers()}
    weights = helpers.snapshot(model.variables + optimizer.variables)
    original, calls = getattr(module, name), []

    def fails_once(*args, **kwargs):
        calls.append(args)
        if len(calls) == call:
            raise ZeroDivisionError(name)
        return original(*args, **kwargs)

    monkeypatch.setattr(module, name, fails_once)
    with pytest.raises(ZeroDivisionError, match=name):
        convert.apply_policy(model, "mixed_float16")
    monkeypatch.undo()
    assert_float32(model)
    assert model.optimizer is optimizer
    helpers.assert_unchanged(model.variables + optimizer.variables, weights)
    traced = {"train_function", "test_function", "predict_function"}
    for x in model._flatten_layers():
        before, after = attributes[id(x)], vars(x)
        assert after.keys() == before.keys()
        for key in before.keys() - traced - {"_inbound_nodes"}:
            assert after[key] is before[key] or after[key] == before[key], key
    assert losses(model, 2) == losses(twin, 2)


def test_conversions_are_undone_in_reverse_order_and_once():
    model = compiled()
    first = convert.apply_policy(model, "mixed_float16")
    second = convert.apply_policy(model, "mixed_bfloat16")
    with pytest.raises(RuntimeError, match="Undo the later conversion"):
        first.undo()
    assert body(model).compute_dtype == "bfloat16"
    second.undo()
    assert body(model).compute_dtype == "float16"
    first.undo()
    assert_float32(model)
    with pytest.raises(RuntimeError, match="undone already"):
        first.undo()


@pytest.mark.filterwarnings("ignore:.* does not have a .quantize. method")
def test_a_conversion_is_not_undone_over_a_quantization():
    with tfmix.policy_scope("mixed_float16"):
        model = small_model()
    report = convert.apply_policy(model, "float32")
    model.quantize("int8")
    before = model.predict(X, verbose=0)
    with pytest.raises(RuntimeError, match="'body'.*quantize a copy instead"):
        report.undo()
    np.testing.assert_array_equal(model.predict(X, verbose=0), before)


def test_undoing_a_whole_whose_part_was_converted_again_is_refused():
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.Sequential([keras.layers.Dense(5), keras.layers.Dense(4)]),
            keras.layers.Dense(1),
        ]
    )
    whole = convert.apply_policy(model, "mixed_float16")
    part = convert.apply_policy(model.layers[0], "mixed_bfloat16")
    with pytest.raises(RuntimeError, match="Undo the later conversion"):
        whole.undo()
    part.undo()
    whole.undo()
    assert_float32(model)


def test_undoing_prepare_brings_the_first_optimizer_back():
    model = compiled()
    optimizer = model.optimizer
    losses(model)
    _, given, report = convert.prepare(model, adam(), "mixed_float16")
    assert model.optimizer is given
    losses(model)
    report.undo()
    assert model.optimizer is optimizer
    losses(model)


def test_a_fixed_factor_is_restored():
    optimizer = keras.optimizers.SGD(0.05, loss_scale_factor=64.0)
    model = compiled(optimizer)
    report = convert.apply_policy(model, "mixed_float16")
    assert optimizer.loss_scale_factor is None
    report.undo()
    assert model.optimizer is optimizer
    assert optimizer.loss_scale_factor == 64.0


def normalized(*nested):
    """Returns a model that normalizes a feature near 2000."""
    norm, last = keras.layers.LayerNormalization(), keras.layers.Dense(4)
    parts = [keras.Sequential([norm, last])] if nested else [norm, last]
    offset = keras.layers.Rescaling(1.0, 2000.0)
    return keras.Sequential([keras.Input((6,)), offset, *parts])


@pytest.mark.costly
def test_a_model_in_another_passes_float32_on_after_its_conversion(tmp_path):
    # Under Keras's own policy, the inner model rounds its inputs.
    keras.config.set_dtype_policy("mixed_float16")
    model = normalized("nested")
    keras.config.set_dtype_policy("float32")
    rounded = model.predict(X, verbose=0)
    report = convert.apply_policy(model, "float32")
    plain = normalized()
    plain.set_weights(model.get_weights())
    expected = plain.predict(X, verbose=0)
    model.save(tmp_path / "converted.keras")
    loaded = keras.saving.load_model(tmp_path / "converted.keras")
    for each in (model, loaded):
        found = each.predict(X, verbose=0)
        helpers.assert_close(found, expected, "float32")
    report.undo()
    # A feature of 2000 keeps no decimal place in float16.
    assert np.abs(rounded - expected).max() > 0.01
    helpers.assert_same_bits(model.predict(X, verbose=0), rounded)
