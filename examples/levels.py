"""LeNet-5 in 16 bit, by the name of a level.

One call converts the model, wraps the optimizer and guards the training step.
The script learns scikit-learn's scanned digits, in a quarter of a minute on a
CPU.
"""

import keras
from keras import layers
from sklearn import datasets, model_selection

import tfmix

LEVEL = "O2"  # "O0" is float32, "O1" careful, "O3" float16 throughout
SEED = 0
EPOCHS = 5

x, y = datasets.load_digits(return_X_y=True)
train_x, test_x, train_y, test_y = model_selection.train_test_split(
    (x / 16).astype("float32").reshape(-1, 8, 8, 1),
    y,
    test_size=0.3,
    stratify=y,
    random_state=0,
)

keras.utils.set_random_seed(SEED)
model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        layers.UpSampling2D(interpolation="bilinear"),
        layers.Conv2D(6, 5, padding="same", activation="relu"),
        layers.MaxPooling2D(),
        layers.Conv2D(16, 5, padding="same", activation="relu"),
        layers.MaxPooling2D(),
        layers.Flatten(),
        layers.Dense(120, activation="relu"),
        layers.Dense(84, activation="relu"),
        layers.Dense(10),
    ]
)
model, optimizer, report = tfmix.prepare(
    model, keras.optimizers.Adam(0.002), level=LEVEL
)
print(report)  # one row per layer; report.undo() restores the model
model.compile(
    optimizer,
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
model.fit(train_x, train_y, batch_size=32, epochs=EPOCHS, verbose=2)

_, accuracy = model.evaluate(test_x, test_y, verbose=0)
print(f"{LEVEL}: {accuracy:.1%} right")
