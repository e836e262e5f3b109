"""The guide's loop from scratch with JAX, its state and its metric."""

import jax
import keras
import numpy as np
from sklearn import datasets


def main(jit=False):
    inputs = keras.Input(shape=(64,), name="digits")
    x1 = keras.layers.Dense(64, activation="relu")(inputs)
    x2 = keras.layers.Dense(64, activation="relu")(x1)
    outputs = keras.layers.Dense(10, name="predictions")(x2)
    model = keras.Model(inputs=inputs, outputs=outputs)
    optimizer = keras.optimizers.Adam(learning_rate=1e-3)
    loss_fn = keras.losses.CategoricalCrossentropy(from_logits=True)
    train_acc_metric = keras.metrics.CategoricalAccuracy()

    def compute_loss_and_updates(trainable, frozen, metric_variables, x, y):
        y_pred, frozen = model.stateless_call(trainable, frozen, x)
        loss = loss_fn(y, y_pred)
        metric_variables = train_acc_metric.stateless_update_state(
            metric_variables, y, y_pred
        )
        return loss, (frozen, metric_variables)

    grad_fn = jax.value_and_grad(compute_loss_and_updates, has_aux=True)

    def train_step(state, data):
        trainable, frozen, optimizer_variables, metric_variables = state
        (loss, (frozen, metric_variables)), grads = grad_fn(
            trainable, frozen, metric_variables, *data
        )
        trainable, optimizer_variables = optimizer.stateless_apply(
            optimizer_variables, grads, trainable
        )
        return loss, (trainable, frozen, optimizer_variables, metric_variables)

    optimizer.build(model.trainable_variables)
    state = (
        [v.value for v in model.trainable_variables],
        [v.value for v in model.non_trainable_variables],
        [v.value for v in optimizer.variables],
        [v.value for v in train_acc_metric.variables],
    )
    step = jax.jit(train_step) if jit else train_step
    x, y = datasets.load_digits(return_X_y=True)
    x, y = x.astype("float32") / 16, keras.utils.to_categorical(y)
    losses = []
    for i in [*range(0, 1024, 64)] * 2:
        loss, state = step(state, (x[i : i + 64], y[i : i + 64]))
        losses.append(float(loss))
    for metric_variable, value in zip(
        train_acc_metric.variables, state[3], strict=True
    ):
        metric_variable.assign(value)
    return [*losses, float(np.mean(losses[-8:]))]
