"""The models of `benchmarks.gpu`, each in a full and a tiny size.

They are plain Keras under the active policy, because Keras's own rows must not
use tfmix.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers


@dataclasses.dataclass(frozen=True)
class Task:
    """A model and a batch for it.

    Attributes:
        title: The model and the batch, for tables.
        build: Function of `sizes` that creates the model.
        batch: Function of `rows` and `sizes` that creates inputs and targets.
        rows: The batch size.
        sizes: Keyword arguments of both functions.
        tiny: The same for the tiny size.
    """

    title: str
    build: Callable[..., keras.Model]
    batch: Callable[..., tuple[Any, Any]]
    rows: int
    sizes: dict[str, Any]
    tiny: dict[str, Any]

    def batch_of_all(self) -> tuple[Any, Any]:
        """Returns inputs and targets of the whole batch."""
        return self.batch(self.rows, **self.sizes)


def resnet(size: int, width: int, stages: tuple[int, ...], classes: int) -> Any:
    """Returns a ResNet of bottleneck blocks; (3, 4, 6, 3) is ResNet-50."""
    # Images are bytes, as from a decoder, which are a quarter of float32.
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
    # The 3 x 3 convolution has the stride, as in NVIDIA's version 1.5.
    inner = _convolved(inner, width, 3, strides, relu=True)
    inner = _convolved(inner, 4 * width, 1, 1, relu=False)
    if widens:
        x = _convolved(x, 4 * width, 1, strides, relu=False)
    return layers.Activation("relu")(layers.Add()([x, inner]))


def transformer(
    length: int, width: int, heads: int, blocks: int, vocabulary: int
) -> keras.Model:
    """Returns a transformer encoder that predicts each position's token."""
    inputs = keras.Input((length,), dtype="int32")
    x = layers.Embedding(vocabulary, width)(inputs)
    for _ in range(blocks):
        x = _block(x, width, heads)
    return keras.Model(
        inputs, _logits(layers.LayerNormalization()(x), vocabulary)
    )


def vit(
    size: int, patch: int, width: int, heads: int, blocks: int, classes: int
) -> keras.Model:
    """Returns a vision transformer that averages its patches."""
    inputs = keras.Input((size, size, 3))
    x = layers.Conv2D(width, patch, patch)(inputs)
    x = layers.Reshape((-1, width))(x)
    for _ in range(blocks):
        x = _block(x, width, heads)
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    return keras.Model(inputs, _logits(x, classes))


def _block(x: Any, width: int, heads: int) -> Any:
    normal = layers.LayerNormalization()(x)
    attention = layers.MultiHeadAttention(heads, width // heads)
    x = layers.Add()([x, attention(normal, normal)])
    normal = layers.LayerNormalization()(x)
    hidden = layers.Dense(4 * width, activation="gelu")(normal)
    return layers.Add()([x, layers.Dense(width)(hidden)])


def llama(
    length: int,
    width: int,
    heads: int,
    shared: int,
    hidden: int,
    blocks: int,
    vocabulary: int,
) -> keras.Model:
    """Returns a model of Llama 3's blocks, with `shared` heads for keys."""
    inputs = keras.Input((length,), dtype="int32")
    x = layers.Embedding(vocabulary, width)(inputs)
    for _ in range(blocks):
        normal = layers.RMSNormalization()(x)
        attention = layers.GroupQueryAttention(width // heads, heads, shared)
        mixed = attention(normal, normal, use_causal_mask=True)
        x = layers.Add()([x, mixed])
        normal = layers.RMSNormalization()(x)
        gate = layers.Dense(hidden, activation="silu", use_bias=False)(normal)
        up = layers.Dense(hidden, use_bias=False)(normal)
        gated = layers.Multiply()([gate, up])
        down = layers.Dense(width, use_bias=False)(gated)
        x = layers.Add()([x, down])
    return keras.Model(
        inputs, _logits(layers.RMSNormalization()(x), vocabulary)
    )


def _logits(x: Any, classes: int) -> Any:
    # The product is in 16 bit, and the loss in float32.
    float32 = layers.Activation("linear", dtype="float32")
    return float32(layers.Dense(classes)(x))


def images(rows: int, size: int, classes: int, **_: Any) -> tuple[Any, Any]:
    """Returns random images, in float32, and classes."""
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, size, size, 3)).astype("float32")
    return x, random.integers(0, classes, rows).astype("int32")


def bytes_of_images(rows: int, **sizes: Any) -> tuple[Any, Any]:
    """Returns random images as bytes, and classes."""
    x, y = images(rows, **sizes)
    return np.clip(128 + 40 * x, 0, 255).astype("uint8"), y


def tokens(
    rows: int, length: int, vocabulary: int, **_: Any
) -> tuple[Any, Any]:
    """Returns random tokens, and a target for each position."""
    random = np.random.default_rng(0)
    x = random.integers(0, vocabulary, (2, rows, length)).astype("int32")
    return x[0], x[1]


TASKS = {
    "llama": Task(
        "four Llama-3-8B blocks, 4096 tokens",
        llama,
        tokens,
        2,
        dict(
            **dict(length=2048, width=4096, heads=32, shared=8, hidden=14336),
            **dict(blocks=4, vocabulary=256),
        ),
        dict(
            **dict(length=32, width=256, heads=4, shared=2, hidden=512),
            **dict(blocks=1, vocabulary=32),
        ),
    ),
    "vit": Task(
        "ViT-H/14, 8 x 224 x 224",
        vit,
        images,
        8,
        dict(size=224, patch=14, width=1280, heads=16, blocks=32, classes=1000),
        dict(size=8, patch=4, width=16, heads=2, blocks=1, classes=5),
    ),
    "transformer": Task(
        "transformer, 16384 tokens",
        transformer,
        tokens,
        32,
        dict(length=512, width=768, heads=12, blocks=12, vocabulary=32000),
        dict(length=8, width=8, heads=2, blocks=1, vocabulary=16),
    ),
    "resnet50": Task(
        "ResNet-50, 256 x 224 x 224",
        resnet,
        bytes_of_images,
        256,
        dict(size=224, width=64, stages=(3, 4, 6, 3), classes=1000),
        dict(size=16, width=4, stages=(1, 1), classes=5),
    ),
}


def task(name: str, tiny: bool = False) -> Task:
    """Returns a task, in its full size or in a tiny one."""
    full = TASKS[name]
    return dataclasses.replace(full, sizes=full.tiny, rows=2) if tiny else full
