# %% [markdown]
# # Fine-tune a transformer
#
# A small transformer that knows eight languages learns eight others in 16 bit,
# with adapters only (LoRA). The texts are Django's translations, which it reads
# byte by byte. It takes a minute on a CPU.

# %%
# %pip install -q "../..[plot,examples]"

# %%
import math
import pathlib
import re

import django
import keras
import numpy as np
from keras import ops

import tfmix

LENGTH, CHANNELS, HEADS, TOKENS = 48, 64, 4, 256
NORTHERN = ("da", "sv", "nb", "nl", "de", "fi", "et", "hu")
OTHERS = ("es", "pt", "it", "ro", "fr", "pl", "cs", "tr")


def texts(languages):
    found = {}
    for label, language in enumerate(languages):
        folder = pathlib.Path(django.__file__).parent
        for file in sorted(folder.rglob(f"locale/{language}/**/*.po")):
            lines = file.read_text("utf-8")
            for text in re.findall('^msgstr "(.{12,})"$', lines, re.M):
                raw = text.encode()[:LENGTH].ljust(LENGTH, b"\0")
                found.setdefault(raw, label)
    x = np.frombuffer(b"".join(found), "uint8").reshape(-1, LENGTH)
    order = np.random.default_rng(0).permutation(len(x))
    return x[order].astype("int32"), np.array(list(found.values()))[order]


before_x, before_y = texts(NORTHERN)
x, y = texts(OTHERS)
test_x, test_y, train_x, train_y = x[:700], y[:700], x[700:], y[700:]
print(len(before_x), "texts to learn from first, then", len(train_x))
bytes(token for token in train_x[0] if token).decode(errors="replace")

# %% [markdown]
# ## The network
#
# It has two blocks of attention and dense layers, all of them Keras's own. 0 is
# padding.


# %%
def make_model():
    layers = keras.layers
    tokens = keras.Input((LENGTH,), dtype="int32")
    known = ops.not_equal(tokens, 0)
    places = ops.zeros_like(tokens) + ops.arange(LENGTH)
    x = layers.Embedding(TOKENS, CHANNELS)(tokens)
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
    logits = layers.Dense(8, name="head")(x)
    return keras.Model(tokens, tfmix.float32_output("softmax")(logits))


def train(model, x, y, rate, epochs, callbacks=()):
    model.compile(
        keras.optimizers.Adam(rate),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    model.fit(
        x,
        y,
        batch_size=64,
        epochs=epochs,
        callbacks=list(callbacks),
        verbose=2,
    )


# %% [markdown]
# ## First, in float32
#
# This stands for the model that you would download.

# %%
keras.utils.set_random_seed(0)
with tfmix.policy_scope("float32"):
    trained = make_model()
train(trained, before_x, before_y, 2e-3, epochs=2)

# %% [markdown]
# ## The same weights under another policy
#
# Variables are float32 under the mixed policies, so you can copy the weights.
# The head, whose kernel and bias are the last two weights, is new.
# `"mixed_bfloat16"` works as well, and needs no loss scale.

# %%
with tfmix.policy_scope("mixed_float16"):
    model = make_model()
model.set_weights(trained.get_weights()[:-2] + model.get_weights()[-2:])

# %% [markdown]
# ## Adapters
#
# Each kernel is frozen, and two narrow factors of rank 8 are trained instead.
# The whole head is trained. Add adapters after the model is built and before
# `compile`.

# %%
for layer in model._flatten_layers():
    if isinstance(layer, keras.layers.Dense | keras.layers.EinsumDense):
        if layer.name != "head":
            layer.enable_lora(8)
    elif layer.weights and not layer._layers:
        layer.trainable = False

trained_weights = sum(math.prod(v.shape) for v in model.trainable_variables)
print(f"{trained_weights:,} of {model.count_params():,} weights are trained")

# %% [markdown]
# Is it safe in float16? `check` tries one batch before you train:

# %%
tfmix.check(
    model, train_x[:64], train_y[:64], loss="sparse_categorical_crossentropy"
)

# %% [markdown]
# ## Fine-tune
#
# `compile` wraps Adam, so that bad steps are skipped. The monitor shows the
# skipped steps, and stops a run that is stuck.

# %%
monitor = tfmix.callbacks.LossScaleMonitor()
train(model, train_x, train_y, 5e-3, epochs=6, callbacks=[monitor])

# %%
_, accuracy = model.evaluate(test_x, test_y, verbose=0)
print(
    f"{accuracy:.1%} of texts it has not seen; a guess would be right in 12.5%"
)

# %% [markdown]
# ## Memory
#
# Adam only has state for the adapters and the head, and the layers' outputs
# take half the memory of float32.

# %%
tfmix.hardware.advise(model, batch_size=64)

# %% [markdown]
# ## Keep it
#
# In the file, Keras adds the adapters to the kernels, in float32. The model
# multiplies them in float16 first, so results differ in the last digits. With
# `compile=False`, the file also loads without tfmix.

# %%
model.save("languages.keras")
again = keras.saving.load_model("languages.keras", compile=False)
same = ops.max(ops.abs(again(test_x[:64]) - model(test_x[:64])))
print(f"largest difference of the loaded model's answers: {float(same):.1e}")

# %% [markdown]
# KerasHub's models have `backbone.enable_lora(rank)`, which replaces the loop
# above for the queries and values of all blocks. The page *Adapters, remat,
# export, shards* of the guide shows that, and adapters on int8 kernels.
