"""A U-Net that finds the flower, a mean over all pixels, in `fit`."""

import keras
import numpy as np
from keras import layers
from sklearn import datasets


def main(jit=False):
    image = datasets.load_sample_image("flower.jpg").astype("float32") / 255
    corners = [(i, j) for i in range(0, 352, 48) for j in range(0, 576, 48)]
    x = np.stack([image[i : i + 32, j : j + 32] for i, j in corners])
    y = (x[..., :1] > x[..., 1:2]).astype("int32") + (x[..., :1] > 0.7)
    inputs = keras.Input((32, 32, 3))
    first = layers.Conv2D(8, 3, padding="same", activation="relu")(inputs)
    h = layers.BatchNormalization()(layers.MaxPooling2D()(first))
    h = layers.SeparableConv2D(16, 3, padding="same", activation="relu")(h)
    h = layers.Conv2DTranspose(8, 2, 2, activation="relu")(h)
    h = layers.Concatenate()([h, first])
    outputs = layers.Conv2D(3, 3, padding="same", activation="softmax")(h)
    model = keras.Model(inputs, outputs)
    model.compile(
        keras.optimizers.Adam(3e-3),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
        jit_compile=jit,
    )
    history = model.fit(x, y[..., 0], batch_size=32, epochs=8, verbose=0)
    return history.history["loss"]
