"""Small models for the orders, their data, and a float32 baseline."""

import functools
import types

import keras
import numpy as np

import tfmix
from tests import helpers
from tests.orders.order import FROZEN, OPTIMIZERS


@keras.saving.register_keras_serializable(package="tests.orders")
class Own(keras.Model):
    """A subclassed model with the same layers."""

    def __init__(self, parts=None, **kwargs):
        super().__init__(**kwargs)
        if parts:
            load = keras.saving.deserialize_keras_object
            parts = [load(one) for one in parts]
        self.first, self.bn, self.last = parts or layers_of_all()

    def get_config(self):
        parts = self.first, self.bn, self.last
        parts = [keras.saving.serialize_keras_object(one) for one in parts]
        return {**super().get_config(), "parts": parts}

    def build(self, shape):
        self.first.build(shape)
        self.bn.build((None, 4))
        self.last.build((None, 4))

    def call(self, x, training=False):
        hidden = keras.ops.tanh(self.bn(self.first(x), training=training))
        return keras.ops.cast(self.last(hidden), "float32")


def layers_of_all():
    return (
        # A bias before BatchNormalization would only have noise as gradient.
        keras.layers.Dense(4, use_bias=False, name="first"),
        keras.layers.BatchNormalization(momentum=0.9, name="bn"),
        keras.layers.Dense(2, name="last"),
    )


def make_model(kind):
    """Returns a small model with the same weights each time."""
    if kind == "subclassed":
        model = Own()
        model.build((None, 4))
    else:
        first, bn, last = layers_of_all()
        tanh = keras.layers.Activation("tanh", name="tanh")
        layers = [first, bn, tanh, last]
        if kind == "functional":
            # This head computes in 16 bit, and a sequential model's in float32.
            layers.append(tfmix.float32_output(name="out"))
            inputs = outputs = keras.Input((4,))
            for layer in layers:
                outputs = layer(outputs)
            model = keras.Model(inputs, outputs)
        else:
            model = keras.Sequential([keras.Input((4,)), *layers])
    model.set_weights(small_data().weights)
    return model


@functools.cache
def small_data():
    rng = np.random.default_rng(5)
    x = rng.normal(size=(8, 4)).astype("float32")
    y = (0.5 * x[:, :2] + 0.2 * x[:, 2:]).astype("float32")
    bad = x.copy()
    bad[3, 1] = np.inf
    shapes = [(4, 4), (4,), (4,), (4,), (4,), (4, 2), (2,)]
    weights = [rng.uniform(0.2, 0.8, s).astype("float32") for s in shapes]
    for matrix in (weights[0], weights[5]):
        matrix *= rng.choice(np.float32([-1, 1]), matrix.shape)
    return types.SimpleNamespace(x=x, y=y, bad=bad, weights=weights)


@functools.cache
def replica_batches():
    """Returns a good batch for one replica and a bad one for the other."""
    import tensorflow as tf

    data = small_data()
    rows = tf.constant(data.x), tf.constant(data.bad)
    y = tf.constant(data.y)
    strategy = helpers.mirrored_strategy()
    return strategy.experimental_distribute_values_from_function(
        lambda context: (rows[context.replica_id_in_sync_group], y)
    )


class Baseline:
    """The same training in float32, in plain Keras."""

    _models = {}

    def __init__(self, name, frozen):
        self.name, self.frozen = name, frozenset(frozen)
        self.slots = None
        self.weights = None

    @classmethod
    def prepare(cls):
        """Compiles all models while no policy is active."""
        for name, make in OPTIMIZERS.items() if not cls._models else ():
            for frozen in (None, *FROZEN):
                model = make_model("sequential")
                if frozen:
                    model.get_layer(frozen).trainable = False
                optimizer = make()
                optimizer.build(model.trainable_variables)
                model.compile(optimizer, "mse")
                cls._models[name, frozenset([frozen] if frozen else [])] = model

    def train(self, steps):
        """Returns the weights after some steps, and the last loss."""
        model = self._models[self.name, self.frozen]
        state = [
            variable
            for variable in model.optimizer.variables
            if "learning_rate" not in variable.path
        ]
        slots = self.slots or [np.zeros(v.shape, v.dtype) for v in state]
        for variable, value in zip(state, slots, strict=True):
            variable.assign(value)
        model.set_weights(self.weights)
        for _ in range(steps):
            loss = model.train_on_batch(small_data().x, small_data().y)
        self.slots = helpers.snapshot(state)
        self.weights = model.get_weights()
        return self.weights, float(loss)
