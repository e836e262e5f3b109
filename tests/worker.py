"""One of two workers of `test_multi_worker.py`; prints its final state."""

import json
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def values(variables):
    """Returns variables as nested lists."""
    return [variable.numpy().tolist() for variable in variables]


def main():
    """Trains on data with one row of NaN, which only worker 1 gets."""
    import tensorflow as tf

    # The strategy must be created before other TensorFlow code runs.
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    import keras
    import numpy as np

    import tfmix

    keras.utils.set_random_seed(0)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 4)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    # Worker 0 gets the first 8 of each 16 rows, and worker 1 the others.
    worker = strategy.cluster_resolver.task_id
    rows = slice(8 * worker, 8 * worker + 8)
    x[16 + 8 + 3] = np.nan
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(8),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(1),
            ]
        )
        optimizer = tfmix.LossScaleOptimizer(
            keras.optimizers.Adam(0.01), initial_scale=1024.0
        )
        model.compile(optimizer, loss="mse")
    tfmix.guard(model)

    # Keras's own `fit` fails here: it passes PerReplica data to the model.
    @tf.function
    def step(batch):
        strategy.run(model.train_step, args=(batch,))

    losses = []
    for _ in range(2):
        model.reset_metrics()
        for start in range(0, 64, 16):
            part = slice(start, start + 16)
            step((x[part][rows], y[part][rows]))
        losses.append(float(model.get_metrics_result()["loss"]))
    result = {
        "trained": values(model.trainable_variables),
        "statistics": values(model.non_trainable_variables),
        "loss": losses,
        "loss_scale": optimizer.loss_scale,
        "skipped_steps": optimizer.skipped_steps,
    }
    print("RESULT", json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
