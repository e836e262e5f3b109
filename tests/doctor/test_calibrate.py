"""The calibrated loss scale: the largest that fits, and nothing touched."""

import keras
import numpy as np
import pytest

from tfmix import _errors
from tfmix.doctor import calibrate as calibration
from tfmix.scaling import optimizer as scaling

calibrate = calibration.calibrate_loss_scale


def model(gain=1.0, dtype="mixed_float16"):
    keras.utils.set_random_seed(0)
    built = keras.Sequential(
        [
            keras.Input((1,)),
            keras.layers.Rescaling(gain, dtype=dtype),
            keras.layers.Dense(
                1, use_bias=False, kernel_initializer="ones", dtype=dtype
            ),
            keras.layers.Activation("linear", dtype="float32"),
        ]
    )
    return built


def mean(y, outputs):
    return keras.ops.mean(outputs)


@pytest.mark.parametrize("power", [0, 3, 9, 15])
def test_the_largest_power_of_two_that_fits_is_found(power):
    # The kernel's gradient is the input, times the scale.
    x = np.full((4, 1), 2.0 ** (15 - power), "float32")
    found = calibrate(model(), x, x, loss=mean, margin_bits=0)
    assert found == 2.0**power


def test_the_margin_is_left_free():
    x = np.full((4, 1), 2.0**5, "float32")
    free = calibrate(model(), x, x, loss=mean, margin_bits=3)
    assert free == calibrate(model(), x, x, loss=mean, margin_bits=0) / 8


def test_every_batch_counts():
    x = np.ones((64, 1), "float32")
    x[40] = 2.0**12
    settings = {"loss": mean, "margin_bits": 0, "batch_size": 8}
    first = calibrate(model(), x[:8], x[:8], **settings)
    every = calibrate(model(), x, x, **settings)
    assert every < first


def test_gradients_that_never_fit_are_an_error():
    x = np.full((4, 1), 60_000.0, "float32")
    with pytest.raises(_errors.LossScaleError, match=r"tfmix\.check"):
        calibrate(model(), x, x, loss=lambda y, p: 4.0 * keras.ops.mean(p))


def test_data_that_is_not_finite_is_named():
    x = np.ones((16, 1), "float32")
    x[[9, 12]] = np.nan
    settings = {"loss": mean, "batch_size": 8}
    with pytest.raises(_errors.LossScaleError) as caught:
        calibrate(model(), x, np.ones_like(x), **settings)
    assert "The gradients of batch 1" in str(caught.value)
    assert "`x` holds NaN or infinity in rows 1, 4" in str(caught.value)


def test_thirty_two_batches_are_enough():
    x = np.ones((34, 1), "float32")
    x[32:] = 2.0**12
    settings = {"loss": mean, "margin_bits": 0, "batch_size": 1}
    first = calibrate(model(), x[:32], x[:32], **settings)
    assert calibrate(model(), x, x, **settings) == first
    assert calibrate(model(), x[31:], x[31:], **settings) < first


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_a_model_without_float16_needs_no_scale(dtype):
    x = np.ones((4, 1), "float32")
    assert calibrate(model(dtype=dtype), x, x, loss="mse") == 1.0


def test_the_model_is_as_it_was():
    built = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(4, dtype="mixed_float16"),
            keras.layers.BatchNormalization(dtype="mixed_float16"),
            keras.layers.Dropout(0.5, dtype="mixed_float16"),
        ]
    )
    before = [np.array(variable) for variable in built.variables]
    x = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
    calibrate(built, x, np.zeros((8, 4), "float32"), loss="mse")
    for left, right in zip(before, built.variables, strict=True):
        np.testing.assert_array_equal(left, np.array(right))


def test_a_calibrated_start_skips_no_step():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(256, 8)).astype("float32")
    y = generator.integers(0, 4, 256)
    layers = [
        keras.Input((8,)),
        keras.layers.Dense(32, activation="relu", dtype="mixed_float16"),
        keras.layers.Dense(4, dtype="mixed_float16"),
        keras.layers.Activation("softmax", dtype="float32"),
    ]
    built = keras.Sequential(layers)
    loss = "sparse_categorical_crossentropy"
    start = calibrate(built, x, y, loss=loss)
    optimizer = scaling.LossScaleOptimizer("adam", initial_scale=start)
    built.compile(optimizer, loss)
    built.fit(x, y, epochs=25, verbose=0)
    assert (int(optimizer.iterations), optimizer.skipped_steps) == (200, 0)


def test_an_added_loss_needs_no_targets():
    layer = model().layers[1]
    x = np.full((4, 1), 2.0**12, "float32")

    class Adds(keras.layers.Layer):
        def call(self, x):
            self.add_loss(keras.ops.mean(keras.ops.cast(x, "float32")))
            return x

    built = keras.Sequential([keras.Input((1,)), layer, Adds(dtype="float32")])
    expected = calibrate(model(), x, x, loss=mean, margin_bits=0)
    assert calibrate(built, x, margin_bits=0) == expected


def test_wrong_arguments_are_refused():
    x = np.ones((4, 1), "float32")
    with pytest.raises(ValueError, match="y=None"):
        calibrate(model(), x, None, loss="mse")
    with pytest.raises(ValueError, match="loss=None"):
        calibrate(model(), x, x)
    with pytest.raises(ValueError, match="batch_size=0"):
        calibrate(model(), x, x, loss="mse", batch_size=0)


@pytest.mark.parametrize(
    ("given", "error", "allowed"),
    [
        (-1, ValueError, "0 or more"),
        (True, TypeError, "integer of 0 or more"),
        (1.5, TypeError, "integer of 0 or more"),
    ],
)
def test_a_wrong_margin_is_quoted_as_it_came(given, error, allowed):
    x = np.ones((4, 1), "float32")
    message = f"`margin_bits` must be .*{allowed}.*margin_bits={given!r}"
    with pytest.raises(error, match=message):
        calibrate(model(), x, x, loss="mse", margin_bits=given)


def dataset(x, y, rows):
    tf = pytest.importorskip("tensorflow")
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(rows)


def test_a_dataset_is_tried_batch_by_batch():
    x = np.ones((32, 1), "float32")
    x[20] = 2.0**12
    settings = {"loss": mean, "margin_bits": 0}
    found = calibrate(model(), dataset(x, x, 8), **settings)
    assert found == calibrate(model(), x, x, batch_size=8, **settings)
    endless = dataset(x, x, 8).repeat()
    assert calibrate(model(), endless, **settings) == found


def test_a_dataset_and_targets_are_refused():
    x = np.ones((4, 1), "float32")
    with pytest.raises(ValueError, match="Leave `y` out"):
        calibrate(model(), dataset(x, x, 4), x, loss="mse")
