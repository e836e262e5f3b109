"""LeNet-5 in 16 bit by hand: you set each layer's dtype and the loss scale.

The last dense layer computes in float32, and all others in float16. A callback
sets the loss scale. The script learns scikit-learn's scanned digits, in a
quarter of a minute on a CPU.
"""

import keras
import numpy as np
from keras import layers
from sklearn import datasets, model_selection

import tfmix

BODY = "mixed_float16"  # "float32" to compare with
SEED = 0
EPOCHS = 5

x, y = datasets.load_digits(return_X_y=True)
train_x, test_x, train_y, test_y = model_selection.train_test_split(
    (x / 16).astype("float32").reshape(-1, 8, 8, 1),
    y,
    test_size=0.3,
    stratify=y,
    random_state=0,
)


class GivenLossScale(tfmix.loss_scaling.LossScale):
    """A scale that only you change; bad steps are still skipped."""

    def init(self):
        """Returns the state before the first step."""
        return tfmix.loss_scaling.LossScaleState(np.float32(1024.0))

    def update(self, state, finite):
        """Returns the state unchanged."""
        return state


class HalveInTheMiddle(keras.callbacks.Callback):
    """Sets the loss scale, which the compiled step reads in each step."""

    def on_epoch_begin(self, epoch, logs=None):
        """Sets 1024, and half of it from the middle of the run on."""
        late = 2 * epoch >= EPOCHS
        self.model.optimizer.loss_scale = 512.0 if late else 1024.0


keras.utils.set_random_seed(SEED)
conv = {"padding": "same", "activation": "relu", "dtype": BODY}
model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        layers.UpSampling2D(interpolation="bilinear", dtype=BODY),
        layers.Conv2D(6, 5, **conv),
        layers.MaxPooling2D(dtype=BODY),
        layers.Conv2D(16, 5, **conv),
        layers.MaxPooling2D(dtype=BODY),
        layers.Flatten(dtype=BODY),
        layers.Dense(120, activation="relu", dtype=BODY),
        layers.Dense(84, activation="relu", dtype=BODY),
        layers.Dense(10, dtype="float32"),
    ]
)
# Without a global policy, you wrap the optimizer and guard the model yourself.
optimizer = tfmix.LossScaleOptimizer(
    keras.optimizers.Adam(0.002), loss_scale=GivenLossScale()
)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer, loss=loss, metrics=["accuracy"])
tfmix.guard(model)
callbacks = [HalveInTheMiddle()]
model.fit(train_x, train_y, 32, EPOCHS, verbose=2, callbacks=callbacks)

_, accuracy = model.evaluate(test_x, test_y, verbose=0)
print(f"{accuracy:.1%} right, the last scale {optimizer.loss_scale:g}")
