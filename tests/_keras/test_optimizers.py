"""Keras's optimizers have the attributes that tfmix reads."""

import keras

from tests import helpers
from tfmix._keras import optimizers


@helpers.requires_backend("tensorflow")
def test_a_variable_takes_its_first_value_from_one_made_in_the_same_trace():
    import tensorflow as tf

    sgd, made = keras.optimizers.SGD(), []

    def threes(shape, dtype):
        return tf.fill(shape, 3.0)

    def next_to_it(shape, dtype):
        return made[0].value + 1.0

    @tf.function(autograph=False)
    def first():
        if not made:
            made.append(keras.Variable(threes, (2,)))
            made.append(
                optimizers.add_variable(sgd, shape=(2,), initializer=next_to_it)
            )
        return made[1].value + 0.0

    assert first().numpy().tolist() == [4.0, 4.0]
    assert sgd.variables[-1] is made[1]
