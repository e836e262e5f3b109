"""A custom training loop (JAX) with an explicit loss scale.

Under the policy, `jax.grad` of the plain loss would be enough: it returns
unscaled gradients. Use this loop with models that do not scale their own
gradients. It learns scikit-learn's scanned digits, in seconds on a CPU.
"""

import os

os.environ["KERAS_BACKEND"] = "jax"  # before Keras is imported

import jax
import keras
import numpy as np
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


@jax.jit
def step(trainable, fixed, state, x, y):
    """Runs a step; returns everything that it changes, and the loss."""

    def scaled_loss(trainable):
        outputs, _ = model.stateless_call(trainable, fixed, x, training=True)
        loss = loss_of(y, outputs)
        # The scope makes the compiled step read the current scale.
        with keras.StatelessScope(zip(optimizer.variables, state, strict=True)):
            return optimizer.scale_loss(loss), loss

    grads, loss = jax.grad(scaled_loss, has_aux=True)(trainable)
    trainable, state = optimizer.stateless_apply(state, grads, trainable)
    return trainable, state, loss


trainable = [v.value for v in model.trainable_variables]
fixed = [v.value for v in model.non_trainable_variables]
state = [v.value for v in optimizer.variables]
random = np.random.default_rng(SEED)
for epoch in range(EPOCHS):
    order = random.permutation(len(train_x))
    for rows in np.split(order[: 19 * 64], 19):
        x, y = train_x[rows], train_y[rows]
        trainable, state, loss = step(trainable, fixed, state, x, y)
    print(f"epoch {epoch}: loss {float(loss):.4f}")

variables = [*model.trainable_variables, *optimizer.variables]
for variable, value in zip(variables, [*trainable, *state], strict=True):
    variable.assign(value)
lost = optimizer.skipped_steps
accuracy = float(np.mean(np.argmax(model(test_x), axis=1) == test_y))
print(f"{accuracy:.1%} right, {lost} batches lost")
