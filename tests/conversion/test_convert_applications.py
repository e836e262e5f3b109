"""Every family of `keras.applications` converts, trains and comes back."""

import itertools

import keras
import numpy as np
import pytest

from tests import helpers
from tfmix.conversion import convert

# The smallest member of each family, and the smallest input that it accepts.
SMALLEST = {
    "ConvNeXtTiny": 32,
    "DenseNet121": 32,
    "EfficientNetB0": 32,
    "EfficientNetV2B0": 32,
    "InceptionResNetV2": 75,
    "InceptionV3": 75,
    "MobileNet": 32,
    "MobileNetV2": 32,
    "MobileNetV3Small": 32,
    "NASNetMobile": 32,
    "ResNet50": 32,
    "ResNet50V2": 32,
    "VGG16": 32,
    "Xception": 71,
}
MIXED = ("mixed_float16", "mixed_bfloat16")
PREPROCESSING = {"Rescaling", "Normalization"}
# From about 50 layers on, roundings add up. The tolerance on probabilities is
# that of one layer, times the square root of the depth.
DEPTH = 16
TENSORFLOW = keras.backend.backend() == "tensorflow"
# XLA compiles the others for minutes.
FAMILIES = SMALLEST if TENSORFLOW else ["MobileNet"]
CASES = [*itertools.product(FAMILIES, MIXED)]


def build(name):
    size = SMALLEST[name]
    model = getattr(keras.applications, name)(
        weights=None, input_shape=(size, size, 3), classes=10
    )
    x = np.random.default_rng(2).uniform(-1, 1, (4, size, size, 3))
    return model, x.astype("float32")


@pytest.mark.parametrize(
    ("name", "policy"), helpers.quick_are({("MobileNet", MIXED[1])}, CASES)
)
def test_every_family_converts_trains_and_comes_back(name, policy):
    model, x = build(name)
    # TensorFlow traces these more slowly than it runs them once.
    # Under JAX, every operation of an eager step would be compiled separately.
    model.compile(
        "sgd", "sparse_categorical_crossentropy", run_eagerly=TENSORFLOW
    )
    before = model.predict(x, verbose=0)
    weights = model.get_weights()
    report = convert.apply_policy(model, policy)
    dtype = report.policy.compute_dtype
    after = model.predict(x, verbose=0)
    assert after.dtype == np.float32
    np.testing.assert_allclose(
        after, before, atol=DEPTH * helpers.TOLERANCES[dtype]
    )
    computing = {row.layer: row for row in report.rows}
    dtypes = {x.name: x.compute_dtype for x in model._flatten_layers()}
    for row in computing.values():
        name_of = row.layer.split("/")[-1]
        assert (dtypes[name_of] == "float32") == (row.after == "float32")
    kept = {row.layer_class for row in report.kept}
    assert kept <= PREPROCESSING | {
        "Dense",
        "Activation",
        "GlobalAveragePooling2D",
        "AveragePooling2D",
        "Softmax",
    }
    assert all(row.why for row in report.kept)
    train_one_step(model, x)
    assert any(
        (now != then).any()
        for now, then in zip(model.get_weights(), weights, strict=True)
    )
    report.undo()
    model.set_weights(weights)
    np.testing.assert_array_equal(model.predict(x, verbose=0), before)


def train_one_step(model, x):
    if hasattr(model.optimizer, "loss_scale"):
        # Untrained and normalised over 16 pixels, these have gradients of
        # several hundred at their first layer. (Over 4 pixels they reach
        # 20,000, which overflows at any scale of 1 or more.) A scale of 1 is
        # fine for one step.
        model.optimizer.loss_scale = 1.0
    x = np.random.default_rng(3).uniform(-1, 1, (16, *x.shape[1:]))
    model.fit(x, np.arange(16) % 10, batch_size=16, verbose=0)
    assert int(model.optimizer.iterations) == 1
    assert all(np.isfinite(weight).all() for weight in model.get_weights())


def test_no_family_is_missing():
    modules = {
        name
        for name in dir(keras.applications)
        if name.islower() and not name.startswith(("_", "imagenet"))
    }
    tested = {name.lower() for name in SMALLEST}
    aliases = {"resnet_v2": "resnet50v2", "vgg19": "vgg16"}
    for module in modules:
        stem = aliases.get(module, module.replace("_", ""))
        assert any(name.startswith(stem) for name in tested), module
