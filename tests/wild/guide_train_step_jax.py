"""Keras's guide to `fit` with JAX: `compute_loss_and_updates`, digits."""

import jax
import keras
import numpy as np
from keras import layers
from sklearn import datasets


class CustomModel(keras.Model):
    def compute_loss_and_updates(self, trainable, frozen, x, y, training=False):
        y_pred, frozen = self.stateless_call(
            trainable, frozen, x, training=training
        )
        return self.compute_loss(x, y, y_pred), (y_pred, frozen)

    def train_step(self, state, data):
        trainable, frozen, optimizer_variables, metrics_variables = state
        x, y = data
        compute_loss = self.compute_loss_and_updates
        grad_fn = jax.value_and_grad(compute_loss, has_aux=True)
        (loss, (y_pred, frozen)), grads = grad_fn(
            trainable, frozen, x, y, training=True
        )
        trainable, optimizer_variables = self.optimizer.stateless_apply(
            optimizer_variables, grads, trainable
        )
        new_metrics_vars, logs = [], {}
        for metric in self.metrics:
            start = len(new_metrics_vars)
            these = metrics_variables[start : start + len(metric.variables)]
            if metric.name == "loss":
                these = metric.stateless_update_state(these, loss)
            else:
                these = metric.stateless_update_state(these, y, y_pred)
            result = metric.stateless_result(these)
            logs |= result if isinstance(result, dict) else {"loss": result}
            new_metrics_vars += these
        return logs, (trainable, frozen, optimizer_variables, new_metrics_vars)


def main(jit=False):
    image = datasets.load_sample_image("china.jpg").astype("float32") / 255
    corners = [(i, j) for i in range(0, 352, 32) for j in range(0, 576, 32)]
    x = np.stack([image[i : i + 64, j : j + 64] for i, j in corners])
    x = x.reshape(-1, 64 * 64 * 3)[:192]
    inputs = keras.Input(shape=(64 * 64 * 3,))
    h = layers.Dense(32, activation="relu")(inputs)
    model = CustomModel(inputs, layers.Dense(64 * 64 * 3, "sigmoid")(h))
    sgd = keras.optimizers.SGD(2.0)
    model.compile(optimizer=sgd, loss="mse", metrics=["mae"])
    history = model.fit(x, x, batch_size=64, epochs=8, verbose=0)
    return history.history["loss"]
