"""One of several machines that train together (TensorFlow).

Start it on each machine with its own TF_CONFIG, as for any
`MultiWorkerMirroredStrategy`. One row of scikit-learn's scanned digits is NaN,
in the share of the last worker, and every worker skips that step.
"""

import keras
import numpy as np
import tensorflow as tf
from sklearn import datasets

import tfmix

POLICY = "mixed_float16"  # "float32" to compare with
SEED = 0
EPOCHS = 4
BATCH_SIZE = 64

# The strategy must be created before other TensorFlow code runs.
strategy = tf.distribute.MultiWorkerMirroredStrategy()
workers = strategy.num_replicas_in_sync
number = strategy.cluster_resolver.task_id or 0

x, y = datasets.load_digits(return_X_y=True)
x = (x / 16).astype("float32")
x[BATCH_SIZE - 1] = np.nan

tfmix.set_global_policy(POLICY)
keras.utils.set_random_seed(SEED)
with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
            tfmix.float32_output("softmax"),
        ]
    )
    optimizer = tfmix.LossScaleOptimizer(keras.optimizers.Adam(0.005))
    model.compile(optimizer, loss="sparse_categorical_crossentropy")
    tfmix.guard(model)


@tf.function
def step(batch):
    """Runs a step on all workers, where Keras's `fit` does not work."""
    strategy.run(model.train_step, args=(batch,))


share = BATCH_SIZE // workers
for _ in range(EPOCHS):
    for start in range(0, 1280, BATCH_SIZE):  # the other 517 are for the test
        rows = slice(start + number * share, start + (number + 1) * share)
        step((x[rows], y[rows]))

found = model(x[1280:]).numpy().argmax(axis=1)
accuracy = float(np.mean(found == y[1280:]))
skipped = optimizer.skipped_steps
print(f"worker {number}: {accuracy:.1%} right, {skipped} steps skipped")
