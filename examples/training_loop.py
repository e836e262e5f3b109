"""A custom training loop (TensorFlow) with an explicit loss scale.

Under the policy, `tape.gradient` of the plain loss would be enough: it returns
unscaled gradients. Use this loop to know whether each step was applied, or
with models that do not scale their own gradients. It learns scikit-learn's
scanned digits, in seconds on a CPU.
"""

import keras
import numpy as np
import tensorflow as tf
from sklearn import datasets, model_selection

import tfmix

POLICY = "mixed_float16"  # "float32" to compare with
LOSS_SCALE = "dynamic"  # a number for a fixed one, or a tfmix.DynamicLossScale
SEED = 0
EPOCHS = 8

x, y = datasets.load_digits(return_X_y=True)
train_x, test_x, train_y, test_y = model_selection.train_test_split(
    (x / 16).astype("float32"), y, test_size=0.3, stratify=y, random_state=0
)

keras.utils.set_random_seed(SEED)
tfmix.set_global_policy(POLICY)
model = keras.Sequential(
    [
        keras.Input((64,)),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10),
        tfmix.float32_output("softmax"),
    ]
)
loss_of = keras.losses.SparseCategoricalCrossentropy()
optimizer = tfmix.LossScaleOptimizer(
    keras.optimizers.SGD(0.1, momentum=0.9), loss_scale=LOSS_SCALE
)
optimizer.build(model.trainable_variables)


@tf.function
def step(x, y):
    """Runs a step; returns the loss, and whether the step was applied."""
    with tf.GradientTape() as tape:
        loss = loss_of(y, model(x, training=True))
        scaled = optimizer.scale_loss(loss)
    grads = tape.gradient(scaled, model.trainable_variables)
    grads = optimizer.unscale_gradients(grads)  # never clip before
    grads, _ = tf.clip_by_global_norm(grads, 5.0)
    optimizer.apply(grads, model.trainable_variables, unscaled=True)
    return loss, optimizer.last_step_applied()


data = tf.data.Dataset.from_tensor_slices((train_x, train_y))
data = data.shuffle(len(train_x), seed=SEED).batch(64, drop_remainder=True)
lost = 0
for epoch in range(EPOCHS):
    for x, y in data:
        loss, applied = step(x, y)
        lost += not applied
    optimizer.check_health()  # raises an error if training is stuck
    print(f"epoch {epoch}: loss {float(loss):.4f}, {lost} batches lost")

accuracy = float(np.mean(model(test_x).numpy().argmax(axis=1) == test_y))
print(f"{accuracy:.1%} right, loss scale {optimizer.loss_scale:g}")
