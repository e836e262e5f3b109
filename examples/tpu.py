"""The script that runs unchanged on a TPU: bfloat16, no scale, tiles of 128.

bfloat16 has float32's range, so it needs no loss scale. A TPU multiplies tiles
of 128 x 128, so every size is a multiple of 128. `DataParallel` splits each
batch between all devices. The data is scikit-learn's scanned digits, with 64
pixels padded to 128, and ten classes to 128. Without a TPU, run:

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python tpu.py
"""

import os

os.environ["KERAS_BACKEND"] = "jax"  # before Keras is imported

import keras
import numpy as np
from sklearn import datasets, model_selection

import tfmix

POLICY = "mixed_bfloat16"  # or "auto"; "float32" to compare with
SEED = 0
EPOCHS = 60
TILE = 128
BATCH_SIZE = 8 * TILE  # 128 rows for each of eight devices

x, y = datasets.load_digits(return_X_y=True)
x = np.pad(x / 16, ((0, 0), (0, TILE - 64))).astype("float32")
train_x, test_x, train_y, test_y = model_selection.train_test_split(
    x, y, test_size=0.3, stratify=y, random_state=0
)
train_x, train_y = train_x[:BATCH_SIZE], train_y[:BATCH_SIZE]  # whole batches

keras.distribution.set_distribution(keras.distribution.DataParallel())
keras.utils.set_random_seed(SEED)
tfmix.set_global_policy(POLICY)
model = keras.Sequential(
    [
        keras.Input((TILE,)),
        keras.layers.Dense(2 * TILE, activation="relu"),
        keras.layers.Dense(2 * TILE, activation="relu"),
        # No label is above 9, so the other classes are never predicted.
        keras.layers.Dense(TILE),
        tfmix.float32_output("softmax"),
    ]
)
model.compile(
    keras.optimizers.Adam(2e-3), loss="sparse_categorical_crossentropy"
)
model.fit(train_x, train_y, BATCH_SIZE, epochs=EPOCHS, verbose=2)

found = keras.ops.convert_to_numpy(model(test_x))
accuracy = float(np.mean(found.argmax(axis=1) == test_y))
devices = len(model.layers[0].kernel.value.sharding.device_set)
print(f"{accuracy:.1%} right, on {devices} device(s)")
print(tfmix.hardware.advise(model, BATCH_SIZE))  # every product fits the tiles
