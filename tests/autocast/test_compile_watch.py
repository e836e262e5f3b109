"""`import tfmix` only changes `compile` for models with 16-bit layers."""

import keras
import numpy as np
import pytest
from keras import layers

import tfmix
from tests import test_one_program as one_program
from tfmix._keras import compile_method
from tfmix.autocast import model as mixed_model
from tfmix.loss_scaling import train_step_guard

X = np.random.default_rng(3).normal(size=(16, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
BAD = X.copy()
BAD[5] = np.nan
POLICIES = ("mixed_float16", "mixed_bfloat16")
MODES = {
    "graph": {"jit_compile": False},
    "xla": {"jit_compile": True},
    "eager": {"run_eagerly": True},
}
if keras.backend.backend() == "jax":
    # JAX has no graph without XLA, and eager mode covers that.
    MODES.pop("graph")


def make():
    return keras.Sequential(
        [
            keras.Input((3,)),
            layers.Dense(4),
            layers.BatchNormalization(),
            layers.Dense(1, dtype="float32"),
        ]
    )


def through_a_file(model, folder):
    model.save(folder / "model.keras")
    return keras.models.load_model(folder / "model.keras")


def file_of_a_scope(policy, folder):
    with tfmix.policy_scope(policy):
        model = make()
    return through_a_file(model, folder)


def of_keras_alone(policy, folder):
    keras.config.set_dtype_policy(policy)
    model = make()
    keras.config.set_dtype_policy("float32")
    return model


def file_of_keras_alone(policy, folder):
    return through_a_file(of_keras_alone(policy, folder), folder)


def trained(model, mode):
    """Trains a model with a row of NaN in the second of four batches."""
    model.compile("adam", "mse", **MODES[mode])
    model.fit(BAD, Y, batch_size=4, shuffle=False, epochs=2, verbose=0)
    return model


@pytest.mark.costly
@pytest.mark.parametrize(
    "way", [file_of_a_scope, of_keras_alone, file_of_keras_alone]
)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_16_bit_model_trains_as_where_it_was_made(
    policy, mode, way, tmp_path
):
    with tfmix.policy_scope(policy):
        expected = make()
    model = way(policy, tmp_path)
    model.set_weights(expected.get_weights())
    trained(model, mode)
    trained(expected, mode)
    assert type(model.optimizer) is tfmix.LossScaleOptimizer
    assert model.optimizer.rule == expected.optimizer.rule
    assert model.optimizer.skipped_steps == 2
    for found, wanted in zip(model.weights, expected.weights, strict=True):
        assert np.isfinite(np.asarray(found)).all()
        np.testing.assert_array_equal(found, wanted)


def test_without_the_watch_keras_compiles_alone(tmp_path):
    tfmix.set_global_policy("float32")
    model = of_keras_alone("mixed_float16", tmp_path)
    model.compile("adam", "mse")
    assert mixed_model.policy_of(model) is None
    assert type(model.optimizer) is keras.optimizers.LossScaleOptimizer


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.inner = make()

    def call(self, x):
        return self.inner(x)


@pytest.mark.parametrize("kind", [make, Subclassed])
@pytest.mark.parametrize(
    "wrap", [keras.Optimizer, tfmix.LossScaleOptimizer], ids=["bare", "wrapped"]
)
def test_a_float32_model_is_left_alone(kind, wrap):
    def compiled(watched):
        (compile_method.watch if watched else compile_method.stop_watching)()
        model, optimizer = kind(), keras.optimizers.SGD(0.1)
        if wrap is tfmix.LossScaleOptimizer:
            optimizer = wrap(optimizer)
        before = set(vars(model))
        model.compile(optimizer, "mse")
        assert model.optimizer is optimizer
        assert not train_step_guard.is_guarded(model)
        config = model._compile_config.config
        return set(vars(model)) - before, config.keys(), model

    *watched, model = compiled(True)
    *alone, plain = compiled(False)
    assert watched == alone
    if keras.backend.backend() == "jax" and kind is make:
        assert one_program.program(model) == one_program.program(plain)


def test_a_float32_model_of_a_file_is_left_alone(tmp_path):
    model = make()
    model.compile("adam", "mse")
    model.train_on_batch(X, Y)
    loaded = through_a_file(model, tmp_path)
    assert type(loaded.optimizer) is keras.optimizers.Adam
    assert not {"call", "train_step", "compile"} & vars(loaded).keys()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_part_of_a_loaded_model_is_one_too(policy, tmp_path):
    with tfmix.policy_scope(policy):
        part = keras.Sequential(
            [keras.Input((1,)), layers.Embedding(5000, 3), layers.Flatten()],
            name="part",
        )
        inputs = keras.Input((1,))
        model = keras.Model(inputs, layers.Dense(1)(part(inputs)))
    loaded = through_a_file(model, tmp_path)
    loaded.compile("adam", "mse")
    inner = loaded.get_layer("part")
    assert mixed_model.policy_of(inner).name == policy
    # 2049 is 2048 in float16.
    ids = np.array([[2049.0]], "float32")
    found = inner.predict(ids, verbose=0)
    assert found.dtype == "float32"
    np.testing.assert_array_equal(found, part.predict(ids, verbose=0))
    expected = model.predict(ids, verbose=0)
    np.testing.assert_array_equal(loaded.predict(ids, verbose=0), expected)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_conversion_reaches_the_models_inside_and_goes_back(policy):
    part = make()
    model = keras.Sequential([keras.Input((3,)), part, layers.Dense(1)])
    before = vars(part).keys() - {"_tfmix_marks"}
    report = tfmix.apply_policy(model, policy)
    assert mixed_model.policy_of(part).name == policy
    report.undo()
    assert mixed_model.policy_of(part) is None
    assert vars(part).keys() - {"_tfmix_marks"} == before
    with tfmix.policy_scope(policy):
        part = make()
        model = keras.Sequential([keras.Input((3,)), part, layers.Dense(1)])
    tfmix.apply_policy(model, "float32")
    assert mixed_model.policy_of(part) is None
