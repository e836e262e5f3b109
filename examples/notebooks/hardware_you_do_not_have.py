# %% [markdown]
# # Hardware you do not have
#
# What does mixed precision bring on a GPU or a TPU, and does the model fit? Two
# functions answer before you rent one: `advise` counts, from shapes alone, and
# `compile_for` asks the accelerator's own compiler. Nothing is trained.

# %%
# %pip install -q "../..[plot,examples]"

# %%
import keras

import tfmix

# %% [markdown]
# ## What there is
#
# Each with its memory, and the rates that its maker publishes:

# %%
tfmix.hardware.targets()

# %% [markdown]
# ## A transformer
#
# Four blocks, 512 wide, on texts of 128 tokens:

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
# The first table has the matrix products: what is in 16 bit, and whether the
# shapes suit Tensor Cores (multiples of 8) and a TPU's tiles (128). The second
# has the memory that training takes, under each policy and with optimizers that
# hold less; below it stands the first way in 16 bit that fits the target.

# %%
tfmix.hardware.advise(model, batch_size=32, target="v100")

# %% [markdown]
# Here everything fits. More rows take more memory, and the way to train decides
# how many there can be. In GiB:

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
# `compile_for` hands the training step to XLA's compiler for the target and
# reads what comes out: which products run in which dtype, how many kernels and
# copies there are, the memory as the compiler lays it out, and a bound below
# which no step can be. The compilers are wheels of their own. They run on any
# Linux machine without the device; where one is missing, the error says what to
# install. Where it is there, it takes minutes for a model of this size.


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
# Under JAX `devices=4` shares the batch between four of them. float16 on a TPU
# is refused before anything is compiled, as XLA has no such products there:

# %%
try:
    tfmix.hardware.compile_for(model, 32, target="v5e", policy="mixed_float16")
except ValueError as error:
    print(error)

# %% [markdown]
# From a shell:
#
# ```sh
# tfmix compile model.keras --target h200 --batch 64
# tfmix compile model.keras --target v5e --devices 4 --batch 256
# ```
#
# What only a run tells: the clocks, the input pipeline, and which of two
# kernels the GPU itself finds faster. The page *On hardware you do not have* of
# the guide has a table of what came out for this kind of model.
