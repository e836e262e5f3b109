"""Keras's optimizers have the attributes that tfmix reads."""

import keras
import pytest

import tfmix
from tests import helpers
from tfmix._keras import optimizers


def test_a_map_of_optimizers_is_searched_as_well():
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        pytest.skip("needs a Keras with MultiOptimizer, 3.13 or newer")
    sgd, adam = keras.optimizers.SGD(), keras.optimizers.Adam()
    choice = keras.optimizers.OptimizerMap(sgd, {"a": adam})
    several = keras.optimizers.MultiOptimizer(choice)
    found = list(optimizers.with_nested(several))
    assert found[0] is several
    assert {id(each) for each in found} >= {id(sgd), id(adam)}
    assert set(map(id, optimizers.workers(several))) == {id(sgd), id(adam)}
    assert optimizers.workers(sgd) == [sgd]
    assert list(optimizers.with_nested("adam")) == []


def test_only_keras_and_ours_apply_in_place():
    class Own(keras.optimizers.SGD):
        def apply(self, *args, **kwargs):
            return super().apply(*args, **kwargs)

    sgd, patched = keras.optimizers.SGD(), keras.optimizers.SGD()
    patched.apply = lambda *args: None
    masters = tfmix.optimizers.MasterWeightOptimizer(sgd)
    for one in (sgd, masters, tfmix.LossScaleOptimizer(Own())):
        assert optimizers.is_applied_in_place(one)
    others = [Own(), patched, keras.optimizers.LossScaleOptimizer(sgd), None]
    assert not any(map(optimizers.is_applied_in_place, others))


def test_variables_are_recognised_and_strangers_refused():
    known = [keras.Variable([1.0]), keras.Variable([2.0])]
    sgd = keras.optimizers.SGD()
    optimizers.remember(sgd, known)
    assert optimizers.remembered(sgd) == known
    assert optimizers.recognised(sgd, known[1:])[0] is known[1]
    with pytest.raises(ValueError, match="nknown"):
        optimizers.recognised(sgd, [keras.Variable([3.0])])
    assert not set(map(id, known)) & set(map(id, sgd.variables))


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


def test_variables_without_weight_decay_are_named_as_in_keras():
    kernel = keras.Variable([1.0], name="kernel")
    bias = keras.Variable([1.0], name="bias")
    for arguments in ([bias], None), (None, ["bia"]):
        sgd = keras.optimizers.SGD(weight_decay=0.5)
        sgd.exclude_from_weight_decay(*arguments)
        assert optimizers.uses_weight_decay(sgd, kernel)
        assert not optimizers.uses_weight_decay(sgd, bias)
        (named,) = optimizers.named([kernel, bias], *arguments)
        assert named is bias
