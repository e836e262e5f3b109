"""Keras's layers use their private names like this."""

import importlib

import keras
import numpy as np

from tests._keras.contracts import COMMON, dense
from tfmix._keras import layers


def test_the_seed_generators_are_those_of_layers_that_draw():
    layer = keras.layers.Dropout(0.5)
    (generator,) = layer._seed_generators
    assert not dense()._seed_generators
    # Its dtype is that of counters under TensorFlow.
    assert generator.state.name == "seed_generator_state"
    assert layer.non_trainable_variables == [generator.state]


def test_preprocessing_layers_have_one_base_above_rescaling():
    assert layers.DATA_LAYER.__name__ in ("DataLayer", "TFDataLayer")
    for name in (
        *("Normalization", "Discretization", "CategoryEncoding"),
        *("RandomFlip", "CenterCrop", "MelSpectrogram"),
    ):
        assert issubclass(getattr(keras.layers, name), layers.DATA_LAYER)
    assert not issubclass(keras.layers.Dense, layers.DATA_LAYER)


def test_the_call_context_names_the_outermost_layer():
    entries, x = [], np.ones((2, 3, 4))
    state = importlib.import_module(f"{COMMON}.global_state")

    class Inner(keras.layers.Layer):
        def call(self, inputs):
            context = state.get_global_attribute("current_call_ctx")
            entries.append(context.entry_layer)
            return inputs

    inner = Inner()
    model = keras.Sequential([inner])
    model.build((2, 3, 4))
    entries.clear()
    model(x)
    inner(x)
    assert entries == [model, inner]
    assert state.get_global_attribute("current_call_ctx") is None


def test_a_stateless_scope_gets_each_assignment():
    one, assigned = keras.Variable([1.0]), []
    with keras.StatelessScope() as scope:
        scope.add_update = assigned.append
        one.assign([7.0])
    ((variable, value),) = assigned
    assert variable is one
    assert float(value[0]) == 7.0
