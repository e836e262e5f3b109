"""Trains on several replicas, for `test_replicas.py`, and prints the result."""

import json
import sys

import keras
import tensorflow as tf
from sklearn import datasets

import tfmix


def main(count, reduce_dtype):
    """Trains on digits; the first gradients' sum overflows in float16."""
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * count
    )
    keras.utils.set_random_seed(0)
    tfmix.set_global_policy("mixed_float16")
    strategy = tf.distribute.MirroredStrategy(
        [f"CPU:{each}" for each in range(count)]
    )
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((64,)),
                keras.layers.Dense(64, "relu"),
                keras.layers.Dense(10),
            ]
        )
        optimizer = tfmix.LossScaleOptimizer(
            keras.optimizers.Adam(3e-3), 2.0**19, reduce_dtype=reduce_dtype
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss)
    x, y = datasets.load_digits(return_X_y=True)
    x = (x / 16).astype("float32")
    history = model.fit(x[:1536], y[:1536], 64, epochs=3, verbose=0)
    copies = [
        [each.numpy() for each in variable.value.values]
        for variable in [*model.variables, *optimizer.variables]
    ]
    result = {
        "loss": history.history["loss"][-1],
        "skipped": optimizer.skipped_steps,
        "agree": all(
            (one == first).all() for first, *others in copies for one in others
        ),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] if sys.argv[2] != "None" else None)
