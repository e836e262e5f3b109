"""Descriptions of a model's batch by shapes and dtypes."""

import keras
import numpy as np
import pytest

from tfmix.tools.hardware import model_batches

CLASSES = keras.losses.SparseCategoricalCrossentropy


def two_outputs(form):
    x = keras.Input((4,), batch_size=8)
    size = keras.layers.Dense(3, name="z")(x)
    kind = keras.layers.Dense(5, name="a")(x)
    return keras.Model(x, form({"z": size, "a": kind}))


def kinds(model):
    found = model_batches.targets(model, model.output)
    return keras.tree.map_structure(lambda one: (one.shape, one.dtype), found)


@pytest.mark.costly
def test_each_output_has_the_targets_of_its_own_loss():
    model = two_outputs(lambda outputs: [*outputs.values()])
    model.compile("sgd", loss={"a": CLASSES(), "z": "mse"})
    assert kinds(model) == [((8, 3), "float32"), ((8,), "int32")]


def test_without_a_loss_there_are_no_targets():
    model = two_outputs(dict)
    model.compile("sgd")
    assert model_batches.targets(model, model.output) is None


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.table = keras.layers.Embedding(9, 16)

    def call(self, x):
        return self.table(x["ids"]) + x["f"]


def test_nested_inputs_of_a_subclassed_model_are_known():
    model = Subclassed()
    model({"ids": np.zeros((2, 12), "int32"), "f": np.zeros((2, 12, 16))})
    (found,) = model_batches.inputs(model, 8)
    shapes = {name: one.shape for name, one in found.items()}
    assert shapes == {"ids": (8, 12), "f": (8, 12, 16)}
