"""The models of `benchmarks.gpu`, each in its full and in a tiny size."""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers

import tfmix


@dataclasses.dataclass(frozen=True)
class Task:
    """A model and a batch for it.

    Attributes:
        build: Makes the model, under the policy in force, from `sizes`.
        batch: Makes inputs and targets of `batch_size` rows.
        sizes: What both take by name.
        unit: What is counted per second.
        per_row: How many of them a row of the batch holds.
        batch_size: Rows.
    """

    build: Callable[..., keras.Model]
    batch: Callable[..., tuple[Any, Any]]
    sizes: dict[str, Any]
    unit: str
    per_row: int
    batch_size: int


def resnet(size: int, width: int, stages: tuple[int, ...], classes: int) -> Any:
    """Returns a ResNet of bottleneck blocks; (3, 4, 6, 3) is ResNet-50."""
    # Bytes, as decoders give them: a quarter of what is to be copied.
    inputs = keras.Input((size, size, 3), dtype="uint8")
    x = layers.Rescaling(1 / 127.5, -1.0)(inputs)
    x = _convolved(x, width, 7, 2, relu=True)
    x = layers.MaxPooling2D(3, 2, padding="same")(x)
    for stage, blocks in enumerate(stages):
        for block in range(blocks):
            strides = 2 if stage and not block else 1
            x = _bottleneck(x, width * 2**stage, strides, not block)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, _logits(x, classes))


def _convolved(x: Any, filters: int, kernel: int, strides: int, relu: bool):
    x = layers.Conv2D(filters, kernel, strides, padding="same", use_bias=False)(
        x
    )
    x = layers.BatchNormalization()(x)
    return layers.Activation("relu")(x) if relu else x


def _bottleneck(x: Any, width: int, strides: int, widens: bool) -> Any:
    inner = _convolved(x, width, 1, 1, relu=True)
    # The stride on the 3 x 3 convolution: what NVIDIA calls version 1.5.
    inner = _convolved(inner, width, 3, strides, relu=True)
    inner = _convolved(inner, 4 * width, 1, 1, relu=False)
    if widens:
        x = _convolved(x, 4 * width, 1, strides, relu=False)
    return layers.Activation("relu")(layers.Add()([x, inner]))


def transformer(
    length: int, width: int, heads: int, blocks: int, vocabulary: int
) -> keras.Model:
    """Returns a transformer encoder that names each position's token."""
    inputs = keras.Input((length,), dtype="int32")
    x = layers.Embedding(vocabulary, width)(inputs)
    for _ in range(blocks):
        normal = layers.LayerNormalization()(x)
        attention = layers.MultiHeadAttention(heads, width // heads)
        x = layers.Add()([x, attention(normal, normal)])
        normal = layers.LayerNormalization()(x)
        hidden = layers.Dense(4 * width, activation="gelu")(normal)
        x = layers.Add()([x, layers.Dense(width)(hidden)])
    x = layers.LayerNormalization()(x)
    return keras.Model(inputs, _logits(x, vocabulary))


def lstm(length: int, width: int, vocabulary: int) -> keras.Model:
    """Returns two LSTM layers over embedded tokens."""
    inputs = keras.Input((length,), dtype="int32")
    x = layers.Embedding(vocabulary, width)(inputs)
    for _ in range(2):
        # The orthogonal default needs a QR that bfloat16 has not.
        x = layers.LSTM(
            width,
            return_sequences=True,
            recurrent_initializer="glorot_uniform",
        )(x)
    return keras.Model(inputs, _logits(x, vocabulary))


def head(length: int, width: int, vocabulary: int) -> keras.Model:
    """Returns one hidden layer under a head over a wide vocabulary."""
    inputs = keras.Input((length,), dtype="int32")
    x = layers.Embedding(vocabulary, width)(inputs)
    x = layers.Dense(width, activation="gelu")(x)
    return keras.Model(inputs, _logits(x, vocabulary))


def _logits(x: Any, classes: int) -> Any:
    return tfmix.float32_output()(layers.Dense(classes)(x))


def images(rows: int, size: int, classes: int, **_: Any) -> tuple[Any, Any]:
    """Returns random images and classes."""
    random = np.random.default_rng(0)
    x = random.integers(0, 256, (rows, size, size, 3)).astype("uint8")
    return x, random.integers(0, classes, rows).astype("int32")


def tokens(
    rows: int, length: int, vocabulary: int, **_: Any
) -> tuple[Any, Any]:
    """Returns random tokens and what to predict at each position."""
    random = np.random.default_rng(0)
    x = random.integers(0, vocabulary, (2, rows, length)).astype("int32")
    return x[0], x[1]


TRANSFORMER = {
    "length": 512,
    "width": 768,
    "heads": 12,
    "blocks": 12,
    "vocabulary": 256,
}
TASKS = {
    "resnet50": Task(
        resnet,
        images,
        {"size": 224, "width": 64, "stages": (3, 4, 6, 3), "classes": 1000},
        "images",
        1,
        128,
    ),
    "transformer": Task(transformer, tokens, TRANSFORMER, "tokens", 512, 16),
    "lstm": Task(
        lstm,
        tokens,
        {"length": 128, "width": 1024, "vocabulary": 256},
        "tokens",
        128,
        256,
    ),
    "head": Task(
        head,
        tokens,
        {"length": 256, "width": 1024, "vocabulary": 50304},
        "tokens",
        256,
        32,
    ),
}
_TINY = {
    "resnet50": {"size": 16, "width": 4, "stages": (1, 1), "classes": 5},
    "transformer": {
        "length": 8,
        "width": 8,
        "heads": 2,
        "blocks": 1,
        "vocabulary": 16,
    },
    "lstm": {"length": 4, "width": 4, "vocabulary": 8},
    "head": {"length": 4, "width": 4, "vocabulary": 32},
}


def task(name: str, tiny: bool = False) -> Task:
    """Returns a task, in the size of its name or one that runs anywhere."""
    full = TASKS[name]
    if not tiny:
        return full
    sizes = _TINY[name]
    per_row = sizes.get("length", 1)
    return dataclasses.replace(full, sizes=sizes, per_row=per_row, batch_size=2)
