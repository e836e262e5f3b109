"""Mixed precision in three lines: the policy, the softmax, the optimizer.

Only the three marked lines differ from a float32 script. It learns
scikit-learn's scanned digits, in a few seconds on a CPU.
"""

import keras
from sklearn import datasets, model_selection

import tfmix

POLICY = "mixed_float16"  # or "mixed_bfloat16"; "float32" changes nothing
SEED = 0
EPOCHS = 8

x, y = datasets.load_digits(return_X_y=True)
train_x, test_x, train_y, test_y = model_selection.train_test_split(
    (x / 16).astype("float32"), y, test_size=0.3, stratify=y, random_state=0
)

keras.utils.set_random_seed(SEED)
tfmix.set_global_policy(POLICY)  # the first line
model = keras.Sequential(
    [
        keras.Input((64,)),
        keras.layers.Dense(128, activation="relu"),
        keras.layers.Dense(128, activation="relu"),
        keras.layers.Dense(10),
        tfmix.float32_output("softmax"),  # the second
    ]
)
optimizer = tfmix.LossScaleOptimizer(keras.optimizers.Adam(2e-3))  # the third
model.compile(
    optimizer, loss="sparse_categorical_crossentropy", metrics=["accuracy"]
)
model.fit(train_x, train_y, batch_size=64, epochs=EPOCHS, verbose=2)

_, accuracy = model.evaluate(test_x, test_y, verbose=0)
print(f"{accuracy:.1%} right, {optimizer.skipped_steps} steps skipped")
