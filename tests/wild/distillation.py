"""Knowledge distillation of digits with raw `tf` in `compute_loss`."""

import keras
import tensorflow as tf
from keras import layers
from sklearn import datasets


class Distiller(keras.Model):
    def __init__(self, student, teacher):
        super().__init__()
        self.student, self.teacher = student, teacher
        self.teacher.trainable = False

    def call(self, x):
        return self.student(x)

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        t = 3.0
        soft = tf.nn.softmax(self.teacher(x, training=False) / t)
        logs = tf.nn.log_softmax(y_pred / t)
        distilled = -tf.reduce_mean(tf.reduce_sum(soft * logs, -1)) * t**2
        hard = tf.nn.sparse_softmax_cross_entropy_with_logits(
            tf.cast(y, tf.int32), y_pred
        )
        return 0.1 * tf.reduce_mean(hard) + 0.9 * distilled


def network(units):
    return keras.Sequential(
        [
            keras.Input((64,)),
            layers.Dense(units, activation="relu"),
            layers.Dense(10),
        ]
    )


def main(jit=False):
    x, y = datasets.load_digits(return_X_y=True)
    x, y = x[:1024].astype("float32") / 16, y[:1024]
    teacher = network(64)
    teacher.compile("adam", keras.losses.SparseCategoricalCrossentropy(True))
    teacher.fit(x, y, batch_size=64, epochs=4, verbose=0)
    model = Distiller(network(16), teacher)
    model.compile("adam", metrics=["accuracy"], jit_compile=jit)
    return model.fit(x, y, batch_size=64, epochs=4, verbose=0).history["loss"]
