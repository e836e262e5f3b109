"""All features of an update in one optimizer (TensorFlow).

Gradients are summed over two replicas, checked, unscaled, accumulated over two
batches, clipped and decayed. A batch that overflows is tried again at half the
scale. The script learns scikit-learn's scanned digits, in a quarter of a
minute on two virtual CPU devices.
"""

import keras
import numpy as np
import tensorflow as tf
from sklearn import datasets, model_selection

import tfmix

POLICY = "mixed_float16"  # "float32" to compare with
SEED = 0
EPOCHS = 8
RETRIES = 24  # it takes 24 halvings to get from 2**24 to 1

x, y = datasets.load_digits(return_X_y=True)
train_x, test_x, train_y, test_y = model_selection.train_test_split(
    (x / 16).astype("float32"), y, test_size=0.3, stratify=y, random_state=0
)

(cpu,) = tf.config.list_physical_devices("CPU")
two = [tf.config.LogicalDeviceConfiguration()] * 2
tf.config.set_logical_device_configuration(cpu, two)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

keras.utils.set_random_seed(SEED)
tfmix.set_global_policy(POLICY)
with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
            tfmix.float32_output("softmax"),
        ]
    )
    inner = keras.optimizers.SGD(
        0.2,
        momentum=0.9,
        gradient_accumulation_steps=2,
        weight_decay=1e-4,
        global_clipnorm=5.0,
    )
    optimizer = tfmix.LossScaleOptimizer(inner)
    optimizer.build(model.trainable_variables)
    # Under a strategy, Keras divides the mean by the number of replicas.
    loss_of = keras.losses.SparseCategoricalCrossentropy()


@tf.function
def step(x, y):
    """Runs a step on each replica; returns whether it was applied."""
    with tf.GradientTape() as tape:
        scaled = optimizer.scale_loss(loss_of(y, model(x, training=True)))
    grads = tape.gradient(scaled, model.trainable_variables)
    optimizer.apply(grads, model.trainable_variables)
    return optimizer.last_step_applied()


data = tf.data.Dataset.from_tensor_slices((train_x, train_y))
data = data.shuffle(len(train_x), seed=SEED).batch(64, drop_remainder=True)
lost = 0
for _ in range(EPOCHS):
    for batch in strategy.experimental_distribute_dataset(data):
        for _ in range(1 + RETRIES):
            applied = strategy.run(step, batch)
            # Either all replicas apply the step or none does.
            if strategy.experimental_local_results(applied)[0]:
                break
        else:
            lost += 1

accuracy = float(np.mean(model(test_x).numpy().argmax(axis=1) == test_y))
print(f"{accuracy:.1%} right, {lost} batches lost")
