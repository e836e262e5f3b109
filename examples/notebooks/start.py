# %% [markdown]
# # Start: two lines on top
#
# tfmix is 16-bit training for Keras 3 that reports its own failures. This
# notebook puts a script for scikit-learn's scanned digits into mixed
# precision, watches it train and looks up what that saves. It takes half a
# minute on a CPU.

# %%
# %pip install -q "../..[plot,examples]"

# %% [markdown]
# Keras runs on TensorFlow unless `KERAS_BACKEND` says otherwise; for JAX, run
# `%env KERAS_BACKEND=jax` before this cell.

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
# `import tfmix` was the first. The second is the policy: layers made from now
# on compute in float16 and keep their variables in float32. On a TPU, or on a
# CPU with bfloat16, take `"mixed_bfloat16"`; `"auto"` asks the hardware.

# %%
tfmix.set_global_policy("mixed_float16")

# %% [markdown]
# The rest is the script as it was, but for the last layer: `float32_output`
# casts to float32, so that the matmul before it is fast and the softmax exact.

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
# `tfmix.summary` says what each layer computes in, and in what it keeps its
# variables:

# %%
tfmix.summary(model)

# %% [markdown]
# ## Train, and watch for skipped steps
#
# Gradients are often too small for float16. Inside the model they are scaled to
# order one, and what leaves it is divided again, in float32: there is nothing
# to tune. `compile` has put `tfmix.LossScaleOptimizer` around Adam, which skips
# a step whose gradients are not finite; `LossScaleMonitor` shows how many were,
# and the loss scale, which halves then.

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
# After the run the optimizer has the same numbers:

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
# ## What it saves
#
# `advise` says how much of the work is in 16 bit, whether the shapes suit the
# hardware, and what training takes in memory under each policy. Weights and
# optimizer state weigh the same, since they are float32; what the layers return
# weighs half. In so small a model the weights are most of it; in a large one,
# or with large batches, what the layers return is.

# %%
advice = tfmix.hardware.advise(model, batch_size=64)
advice

# %% [markdown]
# Ten classes are no multiple of 8: Tensor Cores would like 16. For so small a
# layer it does not matter; for a vocabulary it does.
#
# ## Read on
#
# The notebook *When it goes wrong* breaks a model on purpose, *Fine-tune a
# transformer* trains adapters, and *Hardware you do not have* asks what a GPU
# or a TPU would make of a model.
