"""One call converts a trained model to 16 bit, and another one back.

A network is compiled and trained in float32, continues in float16 and goes
back to float32. Its optimizer keeps its state all the time. The script learns
scikit-learn's scanned digits, in seconds on a CPU.
"""

import keras
from sklearn import datasets, model_selection

import tfmix

POLICY = "mixed_float16"  # "float32" to compare with
SEED = 0
EPOCHS = 3  # per stage; there are three stages

x, y = datasets.load_digits(return_X_y=True)
train_x, test_x, train_y, test_y = model_selection.train_test_split(
    (x / 16).astype("float32"), y, test_size=0.3, stratify=y, random_state=0
)

keras.utils.set_random_seed(SEED)
model = keras.Sequential(
    [
        keras.Input((64,)),
        keras.layers.Dense(96, activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
adam = keras.optimizers.Adam(0.002, global_clipnorm=1.0)  # clips unscaled ones
model.compile(adam, "sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(train_x, train_y, batch_size=64, epochs=EPOCHS, verbose=2)

rule = tfmix.DynamicLossScale(initial_scale=2.0**16, growth_steps=1000)
scaled = tfmix.LossScaleOptimizer(adam, loss_scale=rule)
report = tfmix.prepare(model, scaled, POLICY).report
model.fit(train_x, train_y, batch_size=64, epochs=EPOCHS, verbose=2)

report.undo()  # trained weights and the optimizer's state stay
model.fit(train_x, train_y, batch_size=64, epochs=EPOCHS, verbose=2)

_, accuracy = model.evaluate(test_x, test_y, verbose=0)
steps = int(model.optimizer.iterations)  # Adam's, in all three stages
print(f"{accuracy:.1%} right after {steps} steps")
