# %% [markdown]
# # Start: two lines on top
#
# tfmix gives you fast 16-bit training in Keras 3 with the results of float32.
# This notebook changes a script for scikit-learn's scanned digits to mixed
# precision, watches it train, and shows how much memory it saves. It takes half
# a minute on a CPU.

# %%
# %pip install -q "../..[plot,examples]"

# %% [markdown]
# Keras runs on TensorFlow by default. For JAX, run `%env KERAS_BACKEND=jax`
# before this cell.

# %%
import keras
from sklearn import datasets, model_selection

import tfmix

keras.utils.set_random_seed(0)
pixels, digits = datasets.load_digits(return_X_y=True)
train_x, test_x, train_y, test_y = model_selection.train_test_split(
    pixels.astype("float32") / 16, digits, test_size=0.3, random_state=0
)
train_x.shape, test_x.shape

# %% [markdown]
# ## The two lines
#
# `import tfmix` was the first. The second sets the policy: new layers compute
# in float16 and keep their variables in float32. On a TPU, or on a CPU with
# bfloat16, use `"mixed_bfloat16"`. `"auto"` chooses for the hardware.

# %%
tfmix.set_global_policy("mixed_float16")

# %% [markdown]
# The rest of the script stays the same, except for the last layer:
# `float32_output` casts to float32, so that the matmul before it is fast and
# the softmax is exact.

# %%
model = keras.Sequential(
    [
        keras.Input((64,)),
        keras.layers.Dense(256, activation="relu"),
        keras.layers.Dense(256, activation="relu"),
        keras.layers.Dense(10),
        tfmix.float32_output("softmax"),
    ]
)
model.compile(
    "adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"]
)

# %% [markdown]
# `tfmix.summary` lists the dtypes of each layer's computation and variables:

# %%
tfmix.summary(model)

# %% [markdown]
# ## Train, and watch for skipped steps
#
# Gradients are often too small for float16. The model scales them inside, and
# divides them in float32 where they leave, so there is nothing to tune.
# `compile` has wrapped Adam in `tfmix.LossScaleOptimizer`, which skips a step
# whose gradients are not finite. `LossScaleMonitor` shows the skipped steps and
# the loss scale, which halves if gradients overflow inside the model.

# %%
monitor = tfmix.callbacks.LossScaleMonitor(every=5)
history = model.fit(
    train_x,
    train_y,
    batch_size=64,
    epochs=8,
    callbacks=[monitor],
    verbose=2,
)

# %% [markdown]
# After the run, the optimizer has the same numbers:

# %%
optimizer = model.optimizer
print("loss scale:", optimizer.loss_scale)
print("steps applied:", int(optimizer.iterations))
print("steps skipped:", optimizer.skipped_steps)

# %%
_, accuracy = model.evaluate(test_x, test_y, verbose=0)
print(f"{accuracy:.1%} of the digits that it has not seen")

# %% [markdown]
# ## Is it healthy?
#
# `check` runs a batch in float32 and in 16 bit, layer by layer, and names the
# layers that differ.

# %%
tfmix.check(model, train_x[:64], train_y[:64])

# %% [markdown]
# ## Memory
#
# `advise` estimates how much of the work is in 16 bit, whether the shapes suit
# the hardware, and the memory of training under each policy. Weights and
# optimizer state need the same memory, since they are float32. The layers'
# outputs need half. They are a small part of such a small model, but most of a
# large one, or of large batches.

# %%
advice = tfmix.hardware.advise(model, batch_size=64)
advice

# %% [markdown]
# Ten classes are not a multiple of 8, so Tensor Cores would be faster with 16.
# That does not matter for such a small layer, but it does for a vocabulary.
#
# ## Read on
#
# The notebook *When it goes wrong* breaks a model on purpose, *Fine-tune a
# transformer* trains adapters, and *Hardware you do not have* compiles a model
# for a GPU or a TPU.
