"""The guide's loop from scratch: `tf.function`, metric, losses of layers."""

import keras
import tensorflow as tf
from sklearn import datasets


class ActivityRegularizationLayer(keras.layers.Layer):
    def call(self, inputs):
        self.add_loss(1e-2 * tf.reduce_sum(inputs))
        return inputs


def main(jit=False):
    inputs = keras.Input(shape=(64,), name="digits")
    x = keras.layers.Dense(64, activation="relu")(inputs)
    x = ActivityRegularizationLayer()(x)
    x = keras.layers.Dense(64, activation="relu")(x)
    outputs = keras.layers.Dense(10, name="predictions")(x)
    model = keras.Model(inputs=inputs, outputs=outputs)
    optimizer = keras.optimizers.Adam(learning_rate=1e-3)
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    train_acc_metric = keras.metrics.SparseCategoricalAccuracy()

    @tf.function(jit_compile=jit)
    def train_step(x, y):
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss_value = loss_fn(y, logits)
            loss_value += sum(model.losses)
        grads = tape.gradient(loss_value, model.trainable_weights)
        optimizer.apply(grads, model.trainable_weights)
        train_acc_metric.update_state(y, logits)
        return loss_value

    optimizer.build(model.trainable_weights)
    x, y = datasets.load_digits(return_X_y=True)
    pairs = x[:1024].astype("float32") / 16, y[:1024]
    dataset = tf.data.Dataset.from_tensor_slices(pairs)
    dataset = dataset.shuffle(buffer_size=1024, seed=1).batch(64)
    losses = []
    for _ in range(3):
        for x_batch, y_batch in dataset:
            losses.append(float(train_step(x_batch, y_batch)))
        train_acc_metric.reset_state()
    return losses
