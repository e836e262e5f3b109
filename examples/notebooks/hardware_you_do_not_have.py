# %% [markdown]
# # Hardware you do not have
#
# What does mixed precision gain on a GPU or a TPU, and does the model fit? Two
# functions answer before you rent one: `advise` counts from shapes, and
# `compile_for` runs the accelerator's own compiler. Nothing is trained.

# %%
# %pip install -q "../..[plot,examples]"

# %%
import keras

import tfmix

# %% [markdown]
# ## Accelerators
#
# The table lists each accelerator's memory and published rates:

# %%
tfmix.hardware.targets()

# %% [markdown]
# ## A transformer
#
# It has four blocks, is 512 wide, and reads texts of 128 tokens:

# %%
LENGTH, WIDTH, HEADS, WORDS = 128, 512, 8, 8192


def make_model():
    layers = keras.layers
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, WIDTH)(tokens)
    for _ in range(4):
        y = layers.LayerNormalization()(x)
        y = layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(y, y)
        x = x + y
        y = layers.LayerNormalization()(x)
        y = layers.Dense(4 * WIDTH, activation="gelu")(y)
        x = x + layers.Dense(WIDTH)(y)
    x = layers.Dense(WORDS)(layers.LayerNormalization()(x))
    model = keras.Model(tokens, tfmix.float32_output("softmax")(x))
    model.compile("adam", "sparse_categorical_crossentropy")
    return model


with tfmix.policy_scope("mixed_bfloat16"):
    model = make_model()
f"{model.count_params():,} weights"

# %% [markdown]
# ## Does it fit?
#
# The first table lists the matrix products: which are in 16 bit, and whether
# their shapes suit Tensor Cores (multiples of 8) and a TPU's tiles (128). The
# second lists the memory of training, under each policy and with optimizers
# that need less. The line below names the first way that fits the target.

# %%
tfmix.hardware.advise(model, batch_size=32, target="v100")

# %% [markdown]
# Here everything fits. More rows need more memory, so the way to train limits
# the batch size. The sizes are in GiB:

# %%
print("rows  float32  mixed_float16  on a V100, of 16 GB")
for rows in (512, 1024, 2048, 4096):
    advice = tfmix.hardware.advise(model, rows, target="v100")
    whole, half = (
        advice.memory[policy].total / 2**30
        for policy in ("float32", "mixed_float16")
    )
    print(f"{rows:4}  {whole:7.1f}  {half:13.1f}  {advice.fitting}")

# %% [markdown]
# ## What would it run?
#
# `compile_for` passes the training step to XLA's compiler for the target, and
# reads the result: the dtype of each product, the numbers of kernels and
# copies, the memory, and a lower bound of the time per step. The compilers come
# in separate wheels, and run on any Linux machine without the device. If one is
# missing, the error tells you what to install. It takes minutes for a model of
# this size.


# %%
def compiled(target, policy):
    try:
        return tfmix.hardware.compile_for(
            model, 32, target=target, policy=policy
        )
    except ImportError as error:
        print(error)


compiled("v5e", "mixed_bfloat16")

# %%
compiled("h200", "mixed_bfloat16")

# %% [markdown]
# float16 on a TPU is refused at once: XLA has no float16 products there.

# %%
try:
    tfmix.hardware.compile_for(model, 32, target="v5e", policy="mixed_float16")
except ValueError as error:
    print(error)

# %% [markdown]
# You can also run it from a shell:
#
# ```sh
# tfmix compile model.keras --target h200 --batch 64
# tfmix compile model.keras --target v5e --batch 64
# ```
#
# Only a real run shows the effects of clocks, of the input pipeline, and of the
# kernels that a GPU chooses by timing them. The page *On hardware you do not
# have* of the guide has a table of results for such a model.
