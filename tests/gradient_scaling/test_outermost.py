"""The dtype of a model's results depends on how it is called."""

import collections
import itertools
import sys
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfmix
from tests import helpers

X = np.ones((4, 3), "float32")
NAMES = ("mixed_float16", "mixed_bfloat16")
SIXTEEN = {"mixed_float16": "float16", "bfloat16": "bfloat16", "O3": "float16"}


def make_model(name):
    with tfmix.policy_scope(name):
        model = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
        model.compile("sgd", "mse", jit_compile=False)
    return model


WAYS = {
    "__call__": lambda model: model(X),
    "predict": lambda model: model.predict(X, verbose=0),
    "predict_on_batch": lambda model: model.predict_on_batch(X),
    "stateless_call": lambda model: model.stateless_call(
        [v.value for v in model.trainable_variables],
        [v.value for v in model.non_trainable_variables],
        X,
    )[0],
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("way", WAYS)
def test_a_model_returns_float32(way, name):
    assert helpers.dtype_of(WAYS[way](make_model(name))) == "float32"


@pytest.mark.parametrize("name", SIXTEEN)
def test_a_layer_and_a_model_inside_another_return_16_bit(name):
    model, seen = make_model(name), []

    class Outer(keras.Model):
        def call(self, x):
            y = model(x)
            seen.append(helpers.dtype_of(y))
            return y

    with tfmix.policy_scope(name):
        outer = Outer()
    assert helpers.dtype_of(outer(X)) == "float32"
    layer, x = model.layers[0], ops.convert_to_tensor(X)
    assert {*seen, helpers.dtype_of(layer(x))} == {SIXTEEN[name]}


def encoder():
    """Returns results that others use: two of one layer, one with a mask."""
    start = keras.Input((3,))
    twice = layers.Dense(3)
    first = twice(layers.Masking()(keras.layers.Reshape((1, 3))(start)))
    second = twice(first)
    return keras.Model(start, [first, second, layers.Dense(2)(second)])


@pytest.mark.costly
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("way", WAYS)
def test_results_that_others_use_are_float32(way, name):
    keras.utils.set_random_seed(0)
    expected = WAYS[way](encoder())
    keras.utils.set_random_seed(0)
    with tfmix.policy_scope(name):
        model = encoder()
    found = WAYS[way](model)
    assert [helpers.dtype_of(each) for each in found] == ["float32"] * 3
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_allclose(a, b, atol=0.05)
    if way == "__call__":
        masks = [getattr(each, "_keras_mask", None) for each in found]
        assert all(mask is not None for mask in masks)


class Record(dict):
    """Offers its entries as attributes, like many a library's outputs."""

    def __getattr__(self, name):
        if name not in self:
            raise AttributeError(name)
        return self[name]


class Row(list):
    pass


class Both(NamedTuple):
    left: Any
    right: Any


CONTAINERS = {
    "attributes": lambda x: Record(y=x),
    "default": lambda x: collections.defaultdict(list, y=x),
    "list": lambda x: Row([x]),
    "nested": lambda x: {"a": (Record(y=x), [x, ops.ones((1,), "int32")])},
    "named": lambda x: Both(x, {"nothing": None}),
}


@pytest.mark.parametrize("container", CONTAINERS)
def test_containers_keep_their_types_and_hold_float32(container):
    class Returns(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(2)

        def call(self, x):
            return CONTAINERS[container](self.dense(x))

    found = []
    for name in ("float32", "mixed_float16"):
        with tfmix.policy_scope(name):
            found.append(Returns()(X))
    plain, ours = found
    assert described(ours) == described(plain)
    if container == "attributes":
        assert ours.y is ours["y"]
    if container == "default":
        assert ours["new"] == []


def described(nest):
    """Returns a nest of the containers' types and of the leaves' dtypes."""
    if isinstance(nest, dict):
        return type(nest), {key: described(nest[key]) for key in nest}
    if isinstance(nest, list | tuple):
        return type(nest), [described(each) for each in nest]
    if nest is None:
        return None
    return helpers.dtype_of(nest)


@pytest.mark.parametrize("in_scope", [True, False])
def test_a_sum_beyond_float16_is_returned_after_the_scope_as_well(in_scope):
    class Total(keras.Model):
        def call(self, x):
            return ops.sum(x, axis=1)

    with tfmix.policy_scope("mixed_float16"):
        model, x = Total(), np.full((2, 1000), 100.0, "float32")
        inside = model(x)
    found = inside if in_scope else model(x)
    np.testing.assert_array_equal(found, [1e5, 1e5])


def of_five(set_policy):
    set_policy("mixed_float16")
    return keras.Sequential(
        [keras.Input((3,)), *(layers.Dense(3, "relu") for _ in range(5))]
    )


def called(model, training=None):
    return model(ops.convert_to_tensor(X), training=training)


def taped(model, training=None):
    import tensorflow as tf

    with tf.GradientTape() as tape:
        result = ops.cast(called(model, training), "float32")
        loss = tf.reduce_mean(tf.square(result))
    return tape.gradient(loss, model.trainable_variables)


def python_calls(run):
    """Counts the calls of Python functions, which no load of the host moves."""
    count = itertools.count()

    def note(frame, event, argument):
        if event == "call":
            next(count)

    for _ in range(2):
        run()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return next(count)


@helpers.requires_backend("tensorflow")
@pytest.mark.parametrize(("run", "most"), [(called, 1.15), (taped, 1.4)])
@pytest.mark.parametrize("training", [None, True])
def test_eager_mode_makes_few_more_python_calls_than_with_keras(
    run, most, training
):
    # Keras's policy computes all of it in 16 bit, and scales nothing.
    theirs = of_five(keras.config.set_dtype_policy)
    allowed = most * python_calls(lambda: run(theirs, training))
    ours = of_five(tfmix.set_global_policy)
    assert python_calls(lambda: run(ours, training)) <= allowed
