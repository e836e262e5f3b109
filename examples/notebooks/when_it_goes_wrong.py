# %% [markdown]
# # When it goes wrong
#
# A model that trains in float32 can fail in float16 without any warning. This
# one does. `tfmix.check` names the layer, `suggested_policy` fixes it, and
# `undo` restores the model. It takes half a minute on a CPU.

# %%
# %pip install -q "../..[plot,examples]"

# %%
import keras
from keras import ops
from sklearn import datasets, model_selection

import tfmix

measured, benign = datasets.load_breast_cancer(return_X_y=True)
train_x, test_x, train_y, test_y = model_selection.train_test_split(
    measured.astype("float32"), benign, test_size=0.3, random_state=0
)
print("largest measurement:", train_x.max())

# %% [markdown]
# ## A fault
#
# The data has thirty measurements of cells, and says whether a tumour is
# benign. The measurements are not scaled, so the network begins with a layer
# that scales them. Many transformers have such a handwritten layer:


# %%
class RootMeanSquare(keras.layers.Layer):
    """Divides each row by the root of the mean of its squares."""

    def call(self, inputs):
        squares = ops.mean(inputs * inputs, axis=-1, keepdims=True)
        return inputs / ops.sqrt(squares)


def make_model():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((30,)),
            RootMeanSquare(name="normalized"),
            keras.layers.Dense(64, activation="relu", name="first"),
            keras.layers.Dense(64, activation="relu", name="second"),
            keras.layers.Dense(1, name="logit"),
            tfmix.float32_output("sigmoid", name="benign"),
        ]
    )
    model.compile(
        keras.optimizers.Adam(3e-3), "binary_crossentropy", metrics=["accuracy"]
    )
    return model


def train(model, callbacks=()):
    model.fit(
        train_x,
        train_y,
        batch_size=32,
        epochs=15,
        callbacks=list(callbacks),
        verbose=0,
    )
    return model.evaluate(test_x, test_y, verbose=0)[1]


# %%
with tfmix.policy_scope("float32"):
    in_float32 = train(make_model())
with tfmix.policy_scope("mixed_float16"):
    model = make_model()
    in_float16 = train(model)
print(f"float32 {in_float32:.1%}, mixed_float16 {in_float16:.1%}")
print("skipped steps:", model.optimizer.skipped_steps)

# %% [markdown]
# No step was skipped, no loss was NaN, and the network learned nothing: it
# gives every tumour the more frequent answer.
#
# ## Find the layer
#
# `check` runs a batch in float32 and in 16 bit, and judges each layer by
# itself, on the inputs and gradients that it has in float32. So it names the
# layer that causes the fault.

# %%
report = tfmix.check(model, train_x[:32], train_y[:32])
report

# %% [markdown]
# The figure has a bar for each layer: how often its numbers can be doubled
# before they overflow.

# %%
report.plot()

# %% [markdown]
# The output of `normalized` is small enough for float16. But inside, a
# measurement of 4,254 is squared, and float16 ends at 65,504. So the mean is
# infinite, and a number divided by infinity is 0. The layer's output shows it:

# %%
ops.convert_to_numpy(model.get_layer("normalized")(train_x[:4]))[:, :6]

# %% [markdown]
# ## Fix it
#
# `suggested_policy` moves the faulty layers to float32. It checks each
# candidate, so it takes as long as a few checks.

# %%
policy = report.suggested_policy()
policy

# %% [markdown]
# `apply_policy` applies it to the model, in place:

# %%
change = tfmix.apply_policy(model, policy)
change

# %%
print("healthy:", report.again(policy).healthy)
print(f"trained again: {train(model):.1%}, float32 had {in_float32:.1%}")

# %% [markdown]
# `undo` restores the former dtypes, and keeps the trained weights.

# %%
change.undo()
print("normalized computes in", model.get_layer("normalized").compute_dtype)

# %% [markdown]
# ## A sample that is not finite
#
# One measurement is missing, and the file contains infinity instead. The step
# with this sample is skipped as a whole, once per epoch. Bad data does not
# lower the loss scale:

# %%
with tfmix.policy_scope(policy):
    model = make_model()

spoilt = train_x[7, 3]
train_x[7, 3] = float("inf")
monitor = tfmix.callbacks.LossScaleMonitor(every=1)
accuracy = train(model, [monitor])
train_x[7, 3] = spoilt
print(f"{accuracy:.1%}, {model.optimizer.skipped_steps} steps skipped")

# %%
for reading in monitor.timeline[-3:]:
    print(reading)

# %% [markdown]
# A run in which every step is skipped ends with a `LossScaleError` that names
# the variables. `tfmix.callbacks.NumericsMonitor` names the layer that first
# returns NaN during a run. The page *When it goes wrong* of the guide shows
# both.
