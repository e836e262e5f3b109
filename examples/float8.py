"""A small transformer with float8 matrix products, forward and backward.

It reads scikit-learn's scanned digits row by row. A CPU emulates float8 with
casts, so the script shows the effect on training, not the speed. It takes half
a minute.
"""

import keras
from keras import layers
from sklearn import datasets, model_selection

import tfmix

# All suitable layers are named: by default, only layers that are too large for
# a CPU would be chosen.
POLICY = tfmix.Policy("mixed_float8", float8_layers=["Dense", "EinsumDense"])
SEED = 0
EPOCHS = 12

x, y = datasets.load_digits(return_X_y=True)
train_x, test_x, train_y, test_y = model_selection.train_test_split(
    (x / 16).astype("float32").reshape(-1, 8, 8),
    y,
    test_size=0.3,
    stratify=y,
    random_state=0,
)

keras.utils.set_random_seed(SEED)
tfmix.set_global_policy(POLICY)
rows = keras.Input((8, 8))
x = layers.Dense(64)(layers.Concatenate()([rows, rows]))  # 16 wide for float8
for _ in range(2):
    y = layers.LayerNormalization()(x)
    x = x + layers.MultiHeadAttention(4, 16)(y, y)
    y = layers.LayerNormalization()(x)
    x = x + layers.Dense(64)(layers.Dense(128, activation="gelu")(y))
x = layers.Flatten()(layers.LayerNormalization()(x))
model = keras.Model(rows, tfmix.float32_output("softmax")(layers.Dense(10)(x)))
model.compile(
    keras.optimizers.Adam(2e-3),
    loss="sparse_categorical_crossentropy",
    metrics=["accuracy"],
)
model.fit(train_x, train_y, batch_size=64, epochs=EPOCHS, verbose=2)

_, accuracy = model.evaluate(test_x, test_y, verbose=0)
print(f"{accuracy:.1%} right")
# Each layer is compared with float32.
report = tfmix.check(model, train_x[:64], train_y[:64])
print(report)
