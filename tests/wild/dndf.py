"""A neural decision forest from keras.io: joins in `call`, a raw mask."""

import keras
import numpy as np
from keras import layers, ops


class Tree(keras.Model):
    def __init__(self, depth, features, used, classes, rng):
        super().__init__()
        self.depth, self.leaves = depth, 2**depth
        chosen = rng.choice(np.arange(features), used, replace=False)
        self.mask = ops.convert_to_tensor(
            np.eye(features)[chosen], dtype="float32"
        )
        self.pi = self.add_weight(
            initializer="random_normal",
            shape=[self.leaves, classes],
            dtype="float32",
        )
        self.decide = layers.Dense(self.leaves, activation="sigmoid")

    def call(self, features):
        batch = ops.shape(features)[0]
        features = ops.matmul(features, ops.transpose(self.mask))
        decisions = ops.expand_dims(self.decide(features), axis=2)
        decisions = layers.concatenate([decisions, 1 - decisions], axis=2)
        mu = ops.ones([batch, 1, 1])
        begin, end = 1, 2
        for level in range(self.depth):
            mu = ops.tile(ops.reshape(mu, [batch, -1, 1]), (1, 1, 2))
            mu = mu * decisions[:, begin:end, :]
            begin, end = end, end + 2 ** (level + 1)
        mu = ops.reshape(mu, [batch, self.leaves])
        return ops.matmul(mu, keras.activations.softmax(self.pi))


def main(jit=False):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 8)).astype("float32")
    y = (x[:, 0] > 0).astype("int32")
    inputs = keras.Input((8,))
    features = layers.BatchNormalization()(inputs)
    trees = [Tree(3, 8, 6, 2, rng) for _ in range(2)]
    outputs = layers.average([tree(features) for tree in trees])
    model = keras.Model(inputs, outputs)
    loss = "sparse_categorical_crossentropy"
    model.compile(keras.optimizers.Adam(0.01), loss, jit_compile=jit)
    return model.fit(x, y, batch_size=16, epochs=4, verbose=0).history["loss"]
