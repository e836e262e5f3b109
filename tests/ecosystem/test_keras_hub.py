"""KerasHub's backbones and tasks compute and train like in float32.

`make test-ecosystem` runs it in a separate environment.
"""

import functools
import inspect

import keras
import numpy as np
import pytest
from keras import ops

import tfmix
from tests import helpers
from tests.ecosystem import small_models
from tests.ecosystem.small_models import BACKBONES, BOUNDS, SEEDS, models

pytestmark = [
    helpers.requires_backend("tensorflow"),
    # This is KerasHub's warning: T5 passes a mask to layers without masks.
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.mark.parametrize("policy", BOUNDS)
@pytest.mark.parametrize("name", BACKBONES)
def test_a_backbone_computes_as_in_float32(name, policy, record_property):
    inputs = small_models.batch(name)
    exact = small_models.make_model(name, "float32")
    expected = small_models.results(exact, inputs)
    model = small_models.make_model(name, policy)
    model.set_weights(exact.get_weights())
    errors = small_models.errors(model, inputs, expected)
    record_property("error", max(errors))
    assert max(errors) < BOUNDS[policy]


def classifier(name, policy, seed=SEEDS[0]):
    """Returns a classifier on the mean of a backbone's first result."""
    backbone = small_models.make_model(name, policy, seed)
    features = keras.tree.flatten(backbone.output)[0]
    mean = ops.mean(features, axis=tuple(range(1, len(features.shape) - 1)))
    # CLIP returns logits already, which match pictures with words.
    logits = mean if mean.shape[-1] is None else keras.layers.Dense(2)(mean)
    model = keras.Model(backbone.input, tfmix.float32_output()(logits))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss, jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    return model


CLASSES = (models.TextClassifier, models.ImageClassifier)
WORDS = (models.CausalLM, models.Seq2SeqLM)
PIXELS = (models.ImageSegmenter,)
MASKED = (models.MaskedLM,)
# This task also needs an image.
LEFT_OUT = ("PaliGemmaCausalLM",)
# A quick run has one or two tasks of each kind, and those of backbones that
# fall back. The other tasks have the same heads.
QUICK = (
    *("BartSeq2SeqLM", "BertMaskedLM", "BertTextClassifier"),
    *("DeepLabV3ImageSegmenter", "DeiTImageClassifier", "Gemma3CausalLM"),
    *("ESMProteinClassifier", "GPT2CausalLM", "MixtralCausalLM"),
    *("MoonshineAudioToText", "ResNetImageClassifier", "RoformerV2MaskedLM"),
    *("SegFormerImageSegmenter", "T5Seq2SeqLM"),
)


def tasks():
    """Lists the tasks of the small backbones, without duplicates.

    Old names refer to the same classes.
    """
    found = {}
    for name, kind in inspect.getmembers(models, inspect.isclass):
        backbone = getattr(getattr(kind, "backbone_cls", 0), "__name__", None)
        wanted = issubclass(kind, CLASSES + WORDS + PIXELS + MASKED)
        if wanted and backbone in BACKBONES and name not in LEFT_OUT:
            found[kind] = name
    return [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in sorted(found.values())
    ]


def kind_and_backbone(name):
    kind = getattr(models, name)
    return kind, kind.backbone_cls.__name__


def task(name, policy, seed=SEEDS[0]):
    """Creates and compiles a task under a policy, without preprocessor."""
    kind, backbone = kind_and_backbone(name)
    classes = issubclass(kind, CLASSES + PIXELS)
    given = {"backbone": small_models.make_model(backbone, policy, seed)}
    model = kind(
        preprocessor=None, **given, **{"num_classes": 2} if classes else {}
    )
    # The metrics that a task's own `compile` adds need this loss.
    losses = keras.losses
    crossentropy = (
        losses.CategoricalCrossentropy
        if issubclass(kind, PIXELS)
        else losses.SparseCategoricalCrossentropy
    )
    loss = crossentropy(from_logits=True)
    # This is like the task's own `compile`, but learns within 32 steps.
    model.compile(keras.optimizers.Adam(1e-3), loss, jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    return model


@functools.cache
def data(name):
    if name in BACKBONES:
        return small_models.batch(name), np.array([0, 1])
    kind, backbone = kind_and_backbone(name)
    inputs = small_models.batch(backbone)
    words = np.arange(16).reshape(2, 8) % 5
    if issubclass(kind, CLASSES):
        return inputs, np.array([0, 1])
    if issubclass(kind, PIXELS):
        return inputs, keras.utils.to_categorical(inputs[..., 0] > 0.5, 2)
    if issubclass(kind, MASKED):
        places = np.array([[1, 3], [2, 4]])
        return {**inputs, "mask_positions": places}, words[:, :2]
    return inputs, words


def network(name, policy, seed=SEEDS[0]):
    make = classifier if name in BACKBONES else task
    return make(name, policy, seed)


@functools.cache
def in_float32(name):
    make = functools.partial(network, name)
    return small_models.in_float32(make, data(name))


@pytest.mark.parametrize("policy", BOUNDS)
@pytest.mark.parametrize("name", [*BACKBONES, *tasks()])
def test_a_network_trains_as_in_float32(name, policy, record_property):
    starts, expected = in_float32(name)
    model = network(name, policy)
    loss = small_models.trained(model, starts[0], data(name))
    record_property("loss", loss)
    record_property("float32", expected)
    small_models.assert_inside(loss, expected)
    assert model.optimizer.skipped_steps <= 1
