"""Fine-tune a small transformer, trained in float32, in mixed float16.

It names the language of a text, which it reads byte by byte: first one of
eight languages of northern Europe, then, with a new head, one of eight others.
The texts are Django's translations, so there is nothing to download. It takes
half a minute on a CPU.
"""

import pathlib
import re

import django
import keras
import numpy as np
from keras import layers, ops

import tfmix

POLICY = "mixed_float16"  # "float32" to compare with
SEED = 0
EPOCHS = 4
NORTHERN = ("da", "sv", "nb", "nl", "de", "fi", "et", "hu")
OTHERS = ("es", "pt", "it", "ro", "fr", "pl", "cs", "tr")
# The sizes are multiples of 8, which Tensor Cores need.
LENGTH, CHANNELS, HEADS = 48, 32, 4


def texts(languages):
    """Returns bytes `(texts, LENGTH)`, padded with 0, and the languages."""
    found = {}
    for label, language in enumerate(languages):
        folder = pathlib.Path(django.__file__).parent
        for file in sorted(folder.rglob(f"locale/{language}/**/*.po")):
            lines = file.read_text("utf-8")
            for text in re.findall('^msgstr "(.{12,})"$', lines, re.M):
                raw = text.encode()[:LENGTH].ljust(LENGTH, b"\0")
                found.setdefault(raw, label)  # each text only once
    x = np.frombuffer(b"".join(found), "uint8").reshape(-1, LENGTH)
    order = np.random.default_rng(0).permutation(len(x))
    return x[order].astype("int32"), np.array(list(found.values()))[order]


def network():
    """Builds the transformer under the global policy."""
    tokens = keras.Input((LENGTH,), dtype="int32")
    known = ops.not_equal(tokens, 0)
    places = ops.cumsum(ops.ones_like(tokens), axis=1) - 1
    x = layers.Embedding(256, CHANNELS)(tokens)
    x = x + layers.Embedding(LENGTH, CHANNELS)(places)
    for _ in range(2):
        y = layers.LayerNormalization()(x)
        attend = layers.MultiHeadAttention(HEADS, CHANNELS // HEADS)
        x = x + attend(y, y, attention_mask=known[:, None, :])
        y = layers.LayerNormalization()(x)
        y = layers.Dense(4 * CHANNELS, activation="gelu")(y)
        x = x + layers.Dense(CHANNELS)(y)
    x = layers.LayerNormalization()(x)
    x = layers.GlobalAveragePooling1D()(x, mask=known)
    logits = layers.Dense(8)(x)
    model = keras.Model(tokens, tfmix.float32_output("softmax")(logits))
    model.compile(
        keras.optimizers.Adam(2e-3),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model


keras.utils.set_random_seed(SEED)
trained = network()  # it is float32: no policy is set yet
trained.fit(*texts(NORTHERN), batch_size=64, epochs=3, verbose=2)

tfmix.set_global_policy(POLICY)
keras.utils.set_random_seed(SEED)
model = network()
# Only the last two weights are new: kernel and bias of the head.
model.set_weights(trained.get_weights()[:-2] + model.get_weights()[-2:])
x, y = texts(OTHERS)
model.fit(x[700:], y[700:], batch_size=64, epochs=EPOCHS, verbose=2)

_, accuracy = model.evaluate(x[:700], y[:700], verbose=0)
print(f"{accuracy:.1%} right")
print(tfmix.hardware.advise(model, batch_size=64))  # products and memory
