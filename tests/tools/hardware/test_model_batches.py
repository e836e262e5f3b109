"""Descriptions of a model's batch by shapes and dtypes."""

import keras
import numpy as np
import pytest

from tfmix.tools.hardware import model_batches

CLASSES = keras.losses.SparseCategoricalCrossentropy


def wrapped(y_true, y_pred):
    return keras.losses.sparse_categorical_crossentropy(y_true, y_pred)


def refusing(y_true, y_pred):
    raise ValueError("nothing is right")


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


def test_a_loss_of_one_output_belongs_to_that_output():
    model = two_outputs(dict)
    model.compile("sgd", loss={"a": CLASSES()})
    assert kinds(model) == {"z": ((8, 3), "float32"), "a": ((8,), "int32")}


@pytest.mark.parametrize("loss", [CLASSES(name="kind"), wrapped, "ctc"])
def test_class_targets_are_found_by_trying_the_loss(loss):
    x = keras.Input((20, 4), batch_size=8)
    model = keras.Model(x, keras.layers.Dense(5)(x))
    model.compile("sgd", loss=loss)
    assert kinds(model) == ((8, 20), "int32")


def test_without_a_loss_there_are_no_targets():
    model = two_outputs(dict)
    model.compile("sgd")
    assert model_batches.targets(model, model.output) is None


def test_a_loss_that_accepts_no_target_is_refused_with_both_forms():
    model = two_outputs(dict)
    model.compile("sgd", loss={"a": refusing})
    message = r"'refusing'.*\(8, 5\), 'float32'.*\(8,\), 'int32'"
    with pytest.raises(ValueError, match=message):
        kinds(model)


class Subclassed(keras.Model):
    """Accepts rows of a table, with or without further numbers."""

    def build(self, input_shape):
        self.table = self.add_weight(shape=(9, 16), name="table")
        self.head = keras.layers.Dense(4)
        self.head.build((None, 16))

    def call(self, x):
        ids, *numbers = [x["ids"], x["f"]] if isinstance(x, dict) else x
        rows = keras.ops.take(self.table, ids, axis=0)
        return self.head(sum(numbers, keras.ops.mean(rows, 1)))


IDS, NUMBERS = np.zeros((2, 12), "int32"), np.zeros((2, 16), "float32")


@pytest.mark.parametrize("x", [{"ids": IDS, "f": NUMBERS}, [IDS, NUMBERS]])
def test_nested_inputs_and_integers_of_a_subclassed_model_are_known(x):
    model = Subclassed()
    model(x)
    (found,) = model_batches.inputs(model, 8)
    keras.tree.assert_same_structure(found, x)
    ids, numbers = [found["ids"], found["f"]] if type(x) is dict else found
    assert (ids.shape, ids.dtype) == ((8, 12), "int32")
    assert numbers.shape == (8, 16)


def test_a_subclassed_model_that_accepts_no_dtype_gets_advice():
    class Refusing(Subclassed):
        def call(self, x):
            if x.shape[0] == 8:
                raise TypeError("neither")
            return x

    model = Refusing()
    model(NUMBERS)
    message = r"float32 nor int32.*shapes \[\(8, 16\)\].*keras.Input\(shape"
    with pytest.raises(ValueError, match=message):
        model_batches.inputs(model, 8)
