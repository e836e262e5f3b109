"""A model keeps its policy: rules, float32 outputs, losses and metrics."""

import keras
import numpy as np
import pytest
from keras import ops as kops

import tfmix
from tests import helpers, steps
from tfmix._keras import replacing
from tfmix.autocast import global_policy
from tfmix.autocast import record as mixed_model
from tfmix.policy import policy as policies

SIXTEEN = ("float16", "bfloat16")
FLOAT32 = keras.DTypePolicy("float32")
# Loss functions that take other arguments than two (4, 3) arrays.
OTHER_ARGUMENTS = {
    "circle",
    "categorical_generalized_cross_entropy",
    "ctc",
    "deserialize",
    "get",
    "serialize",
    "sparse_categorical_crossentropy",
    "sparse_categorical_focal_crossentropy",
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
        # These are bases and wrappers, and metrics of values, class ids or
        # matrices.
        "Mean",
        "Sum",
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


def rounded(values, dtype):
    """Returns what a dtype makes of the values, in float32."""
    tensor = kops.cast(kops.convert_to_tensor(values), dtype)
    return kops.cast(tensor, "float32")


class Penalised(keras.layers.Layer):
    """Adds the sum of squares of its input to the loss."""

    def call(self, x):
        self.add_loss(kops.sum(kops.square(x)))
        return x


def penalised_model():
    regular = {"activity_regularizer": "l2", "dtype": "mixed_float16"}
    dense = keras.layers.Dense(3, **regular)
    penalised = Penalised(dtype="mixed_float16")
    model = keras.Sequential([keras.Input((4,)), dense, penalised])
    model.compile("sgd", "mse", metrics=["mse"])
    return model


def batch():
    rng = np.random.default_rng(2)
    x = rng.normal(size=(8, 4)).astype("float32")
    return x, rng.normal(size=(8, 3)).astype("float32")


def identity(dtype):
    """Returns its input, rounded to a dtype on the way."""
    with global_policy.policy_scope(f"mixed_{dtype}"):
        return keras.Sequential(
            [keras.Input((3,)), keras.layers.Activation("linear")]
        )


@pytest.mark.parametrize("dtype", SIXTEEN)
@pytest.mark.parametrize("name", LOSS_FUNCTIONS)
def test_a_loss_is_what_float32_predictions_give(name, dtype):
    model = identity(dtype)
    model.compile("sgd", getattr(keras.losses, name), run_eagerly=True)
    got = model.evaluate(PROBABILITIES, LABELS, verbose=0)
    function = getattr(keras.losses, name)
    expected = kops.mean(function(LABELS, rounded(PROBABILITIES, dtype)))
    np.testing.assert_allclose(
        got, helpers.to_numpy(expected), **helpers.tolerance("float32")
    )


@pytest.mark.parametrize("dtype", SIXTEEN)
@pytest.mark.parametrize("name", METRICS)
def test_a_metric_is_what_float32_predictions_give(name, dtype):
    def metric():
        return getattr(keras.metrics, name)(**ARGUMENTS.get(name, {}))

    expected = metric()
    expected.update_state(LABELS, rounded(PROBABILITIES, dtype))
    model = identity(dtype)
    model.compile("sgd", "mse", metrics=[metric()], run_eagerly=True)
    got = model.evaluate(PROBABILITIES, LABELS, verbose=0)[1]
    np.testing.assert_array_equal(got, helpers.to_numpy(expected.result()))


@pytest.mark.parametrize("targets", ["float64", "float16"])
@pytest.mark.parametrize("mode", steps.MODES)
def test_an_error_of_300_is_not_infinite_in_fit(mode, targets):
    model = identity("float16")
    model.compile("sgd", "mse", metrics=["mse"], **steps.settings(mode))
    x = np.full((4, 3), 300.0, "float32")
    results = model.evaluate(x, np.zeros((4, 3), targets), verbose=0)
    assert results == [90000.0, 90000.0]


@pytest.mark.costly
def test_the_policy_of_a_model_holds_in_a_plain_call():
    inputs = keras.Input((1024,), dtype="float16")
    model = keras.Model(inputs, kops.normalize(inputs))
    x = np.full((1, 1024), 10.0, "float16")
    policy = policies.Policy("mixed_float16", float32_ops=["normalize"])
    for given, largest in ((None, 0), (policy, 0.03125), (FLOAT32, 0)):
        if given is not None:
            mixed_model.set_policy(model, given)
        assert mixed_model.policy_of(model) is (
            policy if given is policy else None
        )
        assert float(kops.max(model(x))) == largest


@pytest.fixture
def plain_model():
    """A model that `compile` gives no record."""
    replacing.want(replacing.COMPILE, False)
    return penalised_model()


def test_the_policy_of_a_model_is_detached_completely(plain_model):
    before = set(vars(plain_model))
    mixed_model.set_policy(plain_model, policies.Policy("mixed_float16"))
    assert {"call", "train_step", "compile"} < set(vars(plain_model)) - before
    mixed_model.set_policy(plain_model, FLOAT32)
    assert not {"call", "train_step", "compile"} & (
        set(vars(plain_model)) - before
    )


@pytest.mark.costly
def test_a_method_that_the_user_sets_is_wrapped_and_given_back(plain_model):
    calls = []

    def theirs(*args):
        calls.append(args)
        return type(plain_model).train_step(plain_model, *args)

    object.__setattr__(plain_model, "train_step", theirs)
    mixed_model.set_policy(plain_model, policies.Policy("mixed_float16"))
    assert vars(plain_model)["train_step"] is not theirs
    plain_model.fit(*batch(), verbose=0)
    assert calls
    mixed_model.set_policy(plain_model, FLOAT32)
    assert vars(plain_model)["train_step"] is theirs


@pytest.mark.costly
@pytest.mark.parametrize("policy", ["mixed_float16", "float32"])
def test_a_model_that_is_compiled_again_forgets_the_first_time(policy):
    x, y = np.eye(4, dtype="float32"), np.full((4, 3), 2.0, "float32")
    quiet = {"shuffle": False, "verbose": 0}
    seen = []
    for compiled_before in (True, False):
        keras.utils.set_random_seed(1)
        with global_policy.policy_scope(policy):
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        tfmix.guard(model)
        if compiled_before:
            frozen = tfmix.LossScaleOptimizer(keras.optimizers.SGD(0.0))
            model.compile(frozen, loss="mae", metrics=["mse"])
            model.fit(x, y, **quiet)
            model.evaluate(x, y, verbose=0)
        model.compile(tfmix.LossScaleOptimizer("sgd"), "mse", metrics=["mae"])
        history = model.fit(x, y, epochs=2, **quiet).history
        result = model.evaluate(x, y, verbose=0, return_dict=True)
        seen.append((history, result, model.get_weights()))
    again, once = seen
    assert again[:2] == once[:2]
    for ours, theirs in zip(again[2], once[2], strict=True):
        helpers.assert_same_bits(ours, theirs)


def test_a_model_with_a_policy_loads_without_it():
    x, _ = batch()
    with global_policy.policy_scope("mixed_float16"):
        model = penalised_model()
    objects = {"Penalised": Penalised}
    loaded = helpers.reloaded(model, compile=False, custom_objects=objects)
    # Plain Keras returns the 16-bit numbers.
    found = loaded.predict(x, verbose=0)
    assert found.dtype == "float16"
    np.testing.assert_array_equal(found, model.predict(x, verbose=0))


# JAX has float64 only where it is switched on.
@helpers.requires_backend("tensorflow")
def test_an_explicit_dtype_of_a_loss_is_obeyed():
    model = identity("float16")
    loss = keras.losses.MeanSquaredError(dtype="float64")
    result = loss(np.zeros((1, 3)), model(np.full((1, 3), 300.0)))
    assert helpers.dtype_of(result) == "float64"
