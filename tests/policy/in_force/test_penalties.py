"""Losses, metrics and penalties of 16-bit models, in float32."""

import keras
import numpy as np
import pytest
from absl import logging
from keras import ops as kops

from tests import helpers
from tfmix.policy import op_rules
from tfmix.policy.in_force import losses, penalties
from tfmix.policy.in_force import ops as ops_in_force

SIXTEEN = ("float16", "bfloat16")
# Loss functions of two (4, 3) arrays; those left out need other arguments.
OTHER_ARGUMENTS = {
    "circle",
    "categorical_generalized_cross_entropy",
    "ctc",
    "deserialize",
    "get",
    "serialize",
    "sparse_categorical_crossentropy",
}
LOSS_FUNCTIONS = [
    name
    for name in dir(keras.losses)
    if name[0].islower() and name not in OTHER_ARGUMENTS
]
METRICS = [
    name
    for name in dir(keras.metrics)
    if name[0].isupper()
    and name
    not in {
        # Bases and wrappers, and metrics of class ids or matrices.
        "Metric",
        "MeanMetricWrapper",
        "ConcordanceCorrelation",
        "IoU",
        "BinaryIoU",
        "MeanIoU",
        "OneHotIoU",
        "OneHotMeanIoU",
        "SparseCategoricalAccuracy",
        "SparseCategoricalCrossentropy",
        "SparseTopKCategoricalAccuracy",
    }
]
ARGUMENTS = {
    "PrecisionAtRecall": {"recall": 0.5},
    "RecallAtPrecision": {"precision": 0.5},
    "SensitivityAtSpecificity": {"specificity": 0.5},
    "SpecificityAtSensitivity": {"sensitivity": 0.5},
}
PROBABILITIES = np.array(
    [[0.1, 0.7, 0.2], [0.6, 0.3, 0.1], [0.25, 0.25, 0.5], [0.9, 0.05, 0.05]]
)
LABELS = np.eye(3, dtype="float32")[[1, 2, 2, 0]]


@pytest.fixture(autouse=True)
def _nothing_in_force_before_or_after():
    losses.uninstall()
    ops_in_force.uninstall()
    yield
    losses.uninstall()
    ops_in_force.uninstall()
    assert penalties.replaced() == []
    assert ops_in_force.replaced() == []


@pytest.fixture
def warnings_of_absl(monkeypatch):
    seen = []
    monkeypatch.setattr(
        logging, "warning", lambda text, *args: seen.append(text % args)
    )
    return seen


def half(values, dtype="float16"):
    return kops.cast(kops.convert_to_tensor(values), dtype)


def rounded(values, dtype):
    return kops.cast(half(values, dtype), "float32")


def touched():
    with losses.in_force():
        places = penalties.replaced()
    return {place: vars(place[0])[place[1]] for place in places}


class Penalised(keras.layers.Layer):
    """Adds the sum of squares of its input to the loss."""

    def call(self, x):
        self.add_loss(kops.sum(kops.square(x)))
        return x


def penalised_model(eager=False, dtype="mixed_float16"):
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(3, activity_regularizer="l2", dtype=dtype),
            Penalised(dtype=dtype),
        ]
    )
    model.compile("sgd", "mse", metrics=["mse"], run_eagerly=eager)
    return model


def batch():
    rng = np.random.default_rng(2)
    x = rng.normal(size=(8, 4)).astype("float32")
    return x, rng.normal(size=(8, 3)).astype("float32")


@pytest.mark.parametrize("dtype", SIXTEEN)
@pytest.mark.parametrize("name", LOSS_FUNCTIONS)
def test_a_loss_function_gives_what_float32_predictions_give(name, dtype):
    function = getattr(keras.losses, name)
    expected = function(LABELS, rounded(PROBABILITIES, dtype))
    losses.install()
    actual = function(LABELS, half(PROBABILITIES, dtype))
    helpers.assert_same_bits(actual, expected)


@pytest.mark.parametrize("dtype", SIXTEEN)
@pytest.mark.parametrize("name", METRICS)
def test_a_metric_gives_what_float32_predictions_give(name, dtype):
    def measure(predictions):
        metric = getattr(keras.metrics, name)(**ARGUMENTS.get(name, {}))
        if name in ("Mean", "Sum"):
            metric.update_state(predictions)
        else:
            metric.update_state(LABELS, predictions)
        return metric.result()

    expected = measure(rounded(PROBABILITIES, dtype))
    losses.install()
    helpers.assert_same_bits(measure(half(PROBABILITIES, dtype)), expected)


def test_an_error_of_300_is_not_infinite():
    zeros, predictions = np.zeros((2, 1)), half(np.full((2, 1), 300.0))
    metric = keras.metrics.MeanSquaredError()
    assert np.isinf(keras.losses.mean_squared_error(zeros, predictions)[0])
    losses.install()
    loss = keras.losses.mean_squared_error(zeros, predictions)
    assert helpers.to_numpy(loss).tolist() == [90000.0, 90000.0]
    metric.update_state(zeros, predictions)
    assert float(metric.result()) == 90000.0


def test_a_function_imported_before_is_reached_too():
    from keras.losses import mean_squared_error

    losses.install()
    result = mean_squared_error([0.0], half([300.0]))
    assert float(result) == 90000.0


@helpers.requires_backend("tensorflow")
def test_a_16_bit_softmax_head_keeps_the_gradient_of_a_wrong_sample():
    import tensorflow as tf

    # A logit gap of 20: the probability is below float16's range, and
    # Keras's loss then has no gradient at all.
    logits = tf.constant([[20.0, 0.0]], tf.float16)
    losses.install()
    with tf.GradientTape() as tape:
        tape.watch(logits)
        predictions = keras.activations.softmax(logits)
        loss = keras.losses.CategoricalCrossentropy()(
            np.array([[0, 1]]), predictions
        )
    assert float(loss) == 20.0
    assert tape.gradient(loss, logits).numpy().tolist() == [[1.0, -1.0]]


def test_the_mask_of_predictions_reaches_the_metric():
    predictions = half([[1.0], [100.0]])
    if keras.backend.backend() != "tensorflow":
        pytest.skip("JAX arrays carry no mask")
    predictions._keras_mask = kops.convert_to_tensor([True, False])
    metric = keras.metrics.MeanAbsoluteError()
    losses.install()
    metric.update_state(np.zeros((2, 1)), predictions)
    assert float(metric.result()) == 1.0


@pytest.mark.parametrize("eager", [True, False])
def test_penalties_and_a_compiled_loss_add_up_in_float32(eager):
    x, y = batch()
    losses.install()
    model = penalised_model(eager)
    got = model.fit(x, y, batch_size=8, verbose=0).history["loss"][0]
    reference = penalised_model(eager, dtype="float32")
    history = reference.fit(x, y, batch_size=8, verbose=0).history
    expected = history["loss"][0]
    np.testing.assert_allclose(got, expected, **helpers.tolerance("float16"))


def test_a_penalty_outside_float16_is_finite_with_the_op_rules():
    if keras.backend.backend() != "tensorflow":
        pytest.skip("JAX arrays cannot carry the float32 value")
    losses.install()
    ops_in_force.install(["sum"])
    layer = Penalised(dtype="float16")
    layer(np.ones((512, 512)))
    assert float(layer.losses[0]) == 262144.0


def test_an_activity_regularizer_of_large_outputs_is_finite():
    losses.install()
    layer = keras.layers.Activation(
        "linear", activity_regularizer="l2", dtype="float16"
    )
    layer(np.full((1, 4), 300.0))
    # 0.01 * 4 * 90000.
    np.testing.assert_allclose(
        float(layer.losses[0]), 3600.0, **helpers.tolerance("float32")
    )


@pytest.mark.parametrize("eager", [True, False])
def test_a_model_carries_what_was_attached_to_it(eager):
    x, y = batch()
    model = penalised_model(eager)
    before = dict(vars(model))
    detach = losses.attach(model, op_rules.default_float32_ops())
    history = model.fit(x, y, batch_size=8, verbose=0).history
    assert np.isfinite(history["loss"][0])
    assert model.predict(x, verbose=0).dtype == "float16"
    assert penalties.replaced() == []
    detach()
    assert "train_step" not in vars(model)
    assert "call" not in vars(model)
    assert set(before) <= set(vars(model))


def test_an_attached_model_obeys_its_op_rules_in_a_plain_call():
    inputs = keras.Input((1024,), dtype="float16")
    model = keras.Model(inputs, kops.normalize(inputs))
    x = np.full((1, 1024), 10.0, "float16")
    assert float(kops.max(model(x))) == 0.0
    detach = losses.attach(model, ["normalize"])
    assert float(kops.max(model(x))) == 0.03125
    detach()
    assert float(kops.max(model(x))) == 0.0


def test_detaching_leaves_a_later_replacement_alone():
    model = penalised_model()
    detach = losses.attach(model, [])

    def theirs(data):
        raise NotImplementedError

    object.__setattr__(model, "train_step", theirs)
    detach()
    assert vars(model)["train_step"] is theirs


def test_an_attached_model_saves_and_loads(tmp_path):
    x, _ = batch()
    model = penalised_model()
    losses.attach(model, op_rules.default_float32_ops())
    expected = model.predict(x, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(
        tmp_path / "model.keras",
        compile=False,
        custom_objects={"Penalised": Penalised},
    )
    helpers.assert_same_bits(loaded.predict(x, verbose=0), expected)


def test_a_16_bit_output_is_reported_once_with_its_remedy(warnings_of_absl):
    x, y = batch()
    losses.install()
    model = penalised_model()
    model.fit(x, y, epochs=2, verbose=0)
    model.evaluate(x, y, verbose=0)
    assert len(warnings_of_absl) == 1
    assert "Output 0" in warnings_of_absl[0]
    assert "is float16" in warnings_of_absl[0]
    assert "tfmix.float32_output('softmax')" in warnings_of_absl[0]


def test_a_float32_output_is_not_reported(warnings_of_absl):
    x, y = batch()
    losses.install()
    model = keras.Sequential([keras.layers.Dense(3, dtype="float32")])
    model.compile("sgd", "mse")
    model.fit(x, y, verbose=0)
    assert warnings_of_absl == []


def test_switching_off_restores_every_attribute_by_identity():
    before = touched()
    assert len(before) > 10
    losses.install()
    losses.install()
    during = {place: vars(place[0])[place[1]] for place in before}
    assert all(during[place] is not before[place] for place in before)
    losses.uninstall()
    after = {place: vars(place[0])[place[1]] for place in before}
    assert all(after[place] is before[place] for place in before)


def test_a_block_without_them_computes_as_keras_does():
    predictions = half([300.0])
    losses.install()
    with losses.in_force(active=False):
        assert np.isinf(
            float(keras.losses.mean_squared_error([0.0], predictions))
        )
    assert float(keras.losses.mean_squared_error([0.0], predictions)) == 90000


def test_float32_predictions_are_untouched():
    predictions = rounded(PROBABILITIES, "float32")
    before = keras.losses.mean_squared_error(LABELS, predictions)
    losses.install()
    after = keras.losses.mean_squared_error(LABELS, predictions)
    helpers.assert_same_bits(after, before)


def test_an_explicit_dtype_of_a_loss_is_obeyed():
    losses.install()
    loss = keras.losses.MeanSquaredError(dtype="float64")
    if keras.backend.backend() == "jax":
        pytest.skip("JAX has float64 only where it is switched on")
    result = loss(np.zeros(1), half([300.0]))
    assert keras.backend.standardize_dtype(result.dtype) == "float64"
