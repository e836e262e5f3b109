"""`data.cast` changes floats and nothing else."""

import keras
import numpy as np
import pytest

from tests import helpers
from tfmix import data

only_tensorflow = helpers.requires_backend("tensorflow")


def dataset_of(element):
    import tensorflow as tf

    return tf.data.Dataset.from_tensors(element)


@only_tensorflow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_floats_are_cast_and_the_rest_is_not(dtype):
    element = (
        {"image": np.ones((2, 2), "float64"), "ids": np.array([1, 70000])},
        np.array(["a", "b"]),
        (np.array([True]), np.float32(0.5)),
    )
    (inputs, words, (flag, weight)) = next(
        iter(data.cast(dataset_of(element), dtype))
    )
    assert inputs["image"].dtype.name == dtype
    assert inputs["ids"].dtype.name == "int64"
    assert inputs["ids"].numpy().tolist() == [1, 70000]
    assert words.numpy().tolist() == [b"a", b"b"]
    assert flag.dtype.name == "bool"
    assert weight.dtype.name == dtype
    assert float(weight) == 0.5


@only_tensorflow
@pytest.mark.parametrize(
    "element",
    [np.ones(3, "float32"), (np.ones(3, "float32"),), {"x": np.ones(3)}],
)
def test_the_structure_stays(element):
    import tensorflow as tf

    dataset = dataset_of(element)
    result = next(iter(data.cast(dataset, "float16")))
    tf.nest.assert_same_structure(next(iter(dataset)), result)
    assert tf.nest.flatten(result)[0].dtype == tf.float16


@only_tensorflow
def test_sparse_and_ragged_floats_are_cast():
    import tensorflow as tf

    sparse = tf.sparse.from_dense([[0.0, 1.5]])
    ragged = tf.ragged.constant([[1.0], [2.0, 3.0]])
    result = next(iter(data.cast(dataset_of((sparse, ragged)), "float16")))
    assert [part.dtype for part in result] == [tf.float16, tf.float16]
    assert tf.sparse.to_dense(result[0]).numpy().tolist() == [[0.0, 1.5]]


@only_tensorflow
def test_a_model_trains_on_it():
    import tensorflow as tf

    x, y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    history = model.fit(data.cast(dataset), shuffle=False, verbose=0)
    assert np.isfinite(history.history["loss"][0])


@pytest.mark.parametrize("dtype", ["int8", "fp16", None])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(ValueError, match="must be one of"):
        data.cast(None, dtype)


def test_a_policys_name_is_told_its_dtype():
    with pytest.raises(ValueError, match="compute dtype is 'bfloat16'"):
        data.cast(None, "mixed_bfloat16")


@only_tensorflow
def test_what_is_no_dataset_is_refused():
    with pytest.raises(TypeError, match="from_tensor_slices"):
        data.cast(np.ones(3), "float16")


@pytest.mark.skipif(
    keras.backend.backend() == "tensorflow", reason="about other backends"
)
def test_on_another_backend_it_says_what_to_do():
    with pytest.raises(RuntimeError, match="astype"):
        data.cast(None, "float16")
