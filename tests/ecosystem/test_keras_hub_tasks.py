"""KerasHub's tasks train under a policy like in float32."""

import functools
import inspect

import keras
import numpy as np
import pytest

from tests import helpers
from tests.ecosystem import small_models
from tests.ecosystem.small_models import BACKBONES, BOUNDS, SEEDS, models

pytestmark = [
    helpers.requires_backend("tensorflow"),
    # These are KerasHub's warnings, as for its backbones.
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
CLASSES = (models.TextClassifier, models.ImageClassifier)
WORDS = (models.CausalLM, models.Seq2SeqLM)
PIXELS = (models.ImageSegmenter,)
MASKED = (models.MaskedLM,)
# This task also needs an image.
LEFT_OUT = ("PaliGemmaCausalLM",)
# A quick run has one or two tasks of each kind, and those of backbones that
# fall back. The other tasks have the same heads.
QUICK = (
    "BartSeq2SeqLM",
    "BertMaskedLM",
    "BertTextClassifier",
    "DeepLabV3ImageSegmenter",
    "DeiTImageClassifier",
    "ESMProteinClassifier",
    "Gemma3CausalLM",
    "GPT2CausalLM",
    "MixtralCausalLM",
    "MoonshineAudioToText",
    "ResNetImageClassifier",
    "RoformerV2MaskedLM",
    "SegFormerImageSegmenter",
    "T5Seq2SeqLM",
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


def made(name, policy, seed=SEEDS[0]):
    """Creates and compiles a task under a policy, without preprocessor."""
    kind, backbone = kind_and_backbone(name)
    classes = issubclass(kind, CLASSES + PIXELS)
    given = {"backbone": small_models.made(backbone, policy, seed)}
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


@functools.cache
def in_float32(name):
    return small_models.in_float32(functools.partial(made, name), data(name))


@pytest.mark.parametrize("policy", BOUNDS)
@pytest.mark.parametrize("name", tasks())
def test_a_task_trains_as_in_float32(name, policy, record_property):
    starts, expected = in_float32(name)
    loss = small_models.trained(made(name, policy), starts[0], data(name))
    record_property("loss", loss)
    record_property("float32", expected)
    small_models.assert_inside(loss, expected)
