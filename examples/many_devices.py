"""One bad replica among many: all replicas skip the step.

It trains on all GPUs (`MirroredStrategy`), or under KERAS_BACKEND=jax on all
devices (`DataParallel`). One row of scikit-learn's scanned digits is NaN, so in
each epoch only one replica gets gradients that are not finite. Without a GPU,
it uses four virtual CPU devices, and takes half a minute.
"""

import contextlib
import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import keras
import numpy as np
from sklearn import datasets, model_selection

import tfmix

POLICY = "mixed_float16"  # "float32" to compare with
SEED = 0
EPOCHS = 4


def scope():
    """Returns the scope in which the model is built, on all devices."""
    if keras.backend.backend() == "jax":
        parallel = keras.distribution.DataParallel()
        keras.distribution.set_distribution(parallel)
        return contextlib.nullcontext()
    import tensorflow as tf

    if tf.config.list_physical_devices("GPU"):
        return tf.distribute.MirroredStrategy().scope()
    (cpu,) = tf.config.list_physical_devices("CPU")
    four = [tf.config.LogicalDeviceConfiguration()] * 4
    tf.config.set_logical_device_configuration(cpu, four)
    names = [f"CPU:{number}" for number in range(4)]
    return tf.distribute.MirroredStrategy(names).scope()


x, y = datasets.load_digits(return_X_y=True)
train_x, test_x, train_y, test_y = model_selection.train_test_split(
    (x / 16).astype("float32"), y, test_size=0.3, stratify=y, random_state=0
)
train_x, train_y = train_x[:1216], train_y[:1216]  # 19 whole batches
train_x[65] = np.nan  # in one replica's share of the second batch

tfmix.set_global_policy(POLICY)
keras.utils.set_random_seed(SEED)
with scope():
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(10),
            tfmix.float32_output("softmax"),
        ]
    )
    optimizer = tfmix.LossScaleOptimizer(keras.optimizers.Adam(0.005))
    model.compile(optimizer, loss="sparse_categorical_crossentropy")
    tfmix.guard(model)  # only needed for "float32"
model.fit(train_x, train_y, 64, EPOCHS, shuffle=False, verbose=2)

found = keras.ops.convert_to_numpy(model(test_x))
accuracy = float(np.mean(found.argmax(axis=1) == test_y))
skipped = optimizer.skipped_steps
print(f"{accuracy:.1%} right, {skipped} steps skipped by all")
