"""A benchmark task: recognise the language of a text, byte by byte.

The texts are Django's translation catalogues.
"""

import functools
import gettext
import pathlib
import re
import zlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

LANGUAGES = ("es", "pt", "it", "ro", "fr", "pl", "cs", "tr")
LENGTH, CHANNELS, HEADS, BLOCKS, BATCH_SIZE = 48, 32, 4, 2, 64
# There are 256 bytes and the padding, rounded up to a multiple of 8.
TOKENS = 264
STEPS, RATE = 120, 2e-3
# All translations of a message share its placeholders, tags and links, which
# say nothing about the language.
_NOT_TEXT = re.compile(r"%\(\w+\)\w|%\w|\{\w*\}|<[^>]*>|&\w+;|https?://\S+")
_LEAST_BYTES = 12
# One message in five is for the test, the same ones in every language.
_PARTS = 5


def _translations(language: str) -> Iterator[tuple[str, str]]:
    """Yields each message of Django and its translation, without markup."""
    import django

    root = pathlib.Path(django.__file__).parent
    files = sorted(root.rglob(f"locale/{language}/LC_MESSAGES/*.mo"))
    for path in files:
        with path.open("rb") as file:
            # gettext has no public list of messages.
            catalogue = gettext.GNUTranslations(file)._catalog
        for message, translation in catalogue.items():
            # A plural's key is a pair, and the empty key is the file's header.
            if isinstance(message, str) and message:
                cleaned = " ".join(_NOT_TEXT.sub(" ", translation).split())
                if len(cleaned.encode()) >= _LEAST_BYTES:
                    yield message, cleaned


def _encoded(text: str) -> np.ndarray:
    """Returns the first bytes of a text, plus one, padded with zeros."""
    found = np.zeros(LENGTH, "int32")
    raw = np.frombuffer(text.encode()[:LENGTH], "uint8")
    found[: len(raw)] = raw.astype("int32") + 1
    return found


@functools.cache
def texts() -> tuple[np.ndarray, ...]:
    """Reads the texts; four in five are for training.

    No message is in both parts, in any language. Texts that two languages
    share are left out.

    Returns:
        Training bytes `(texts, length)`, test bytes, and the labels of both,
        all int32. A byte is 1 to 256, and 0 is padding.
    """
    found: dict[str, set[tuple[int, str]]] = {}
    for label, language in enumerate(LANGUAGES):
        for message, text in _translations(language):
            found.setdefault(text, set()).add((label, message))
    parts: tuple[list, list] = ([], [])
    for text, sources in sorted(found.items()):
        if len({label for label, _ in sources}) == 1:
            label, message = min(sources)
            tested = zlib.crc32(message.encode()) % _PARTS == 0
            parts[tested].append((_encoded(text), label))
    train, test = (
        [np.array(column, "int32") for column in zip(*part, strict=True)]
        for part in parts
    )
    return train[0], test[0], train[1], test[1]


@keras.saving.register_keras_serializable(package="benchmarks")
class Positions(keras.layers.Layer):
    """Adds a learned vector for each position."""

    def build(self, input_shape: tuple[Any, ...]) -> None:
        """Creates the table, with a row per position."""
        self.table = self.add_weight(
            name="table", shape=input_shape[1:], initializer="uniform"
        )

    def call(self, inputs: Any) -> Any:
        """Adds the table."""
        return inputs + self.table


def build_model() -> keras.Model:
    """Builds the transformer under the active policy."""
    layers = keras.layers
    tokens = keras.Input((LENGTH,), dtype="int32")
    known = keras.ops.not_equal(tokens, 0)
    x = Positions()(layers.Embedding(TOKENS, CHANNELS)(tokens))
    for _ in range(BLOCKS):
        y = layers.LayerNormalization()(x)
        attend = layers.MultiHeadAttention(HEADS, CHANNELS // HEADS)
        x = x + attend(y, y, attention_mask=known[:, None, :])
        y = layers.LayerNormalization()(x)
        y = layers.Dense(4 * CHANNELS, activation="gelu")(y)
        x = x + layers.Dense(CHANNELS)(y)
    x = layers.LayerNormalization()(x)
    x = layers.GlobalAveragePooling1D()(x, mask=known)
    x = layers.Dense(len(LANGUAGES))(x)
    outputs = layers.Activation("softmax", dtype="float32")(x)
    return keras.Model(tokens, outputs)


def batches(
    x: np.ndarray, y: np.ndarray, seed: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields random batches forever, the same ones for the same seed."""
    random = np.random.default_rng(seed)
    while True:
        rows = random.integers(0, len(x), BATCH_SIZE)
        yield x[rows], y[rows]


def train(optimizer: Any, seed: int) -> float:
    """Trains a transformer; returns its accuracy in percent."""
    x, x_test, y, y_test = texts()
    keras.utils.set_random_seed(seed)
    model = build_model()
    model.compile(optimizer, loss="sparse_categorical_crossentropy")
    model.fit(
        batches(x, y, seed),
        steps_per_epoch=STEPS,
        shuffle=False,  # the batches are random already
        verbose=0,
    )
    predicted = model.predict(x_test, verbose=0).argmax(axis=-1)
    return 100 * float(np.mean(predicted == y_test))
