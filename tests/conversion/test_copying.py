"""A copy takes along the script's own classes, functions and lambdas."""

import importlib
import threading

import keras
import numpy as np
import pytest

from tests import helpers
from tfmix.conversion import convert, own_code
from tfmix.policy import policy as policies

X = np.random.default_rng(5).normal(size=(8, 4)).astype("float32")
FACTOR = 3.0


def scaled(x):
    return x * FACTOR


def own_activation(x):
    return scaled(keras.ops.tanh(x))


def own_metric(y_true, y_pred):
    return keras.ops.mean(keras.ops.abs(y_true - y_pred))


class OwnLoss(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)


class OwnStart(keras.initializers.Initializer):
    def __call__(self, shape, dtype=None):
        return keras.ops.full(shape, 0.1, dtype)


def own_parts():
    inputs = keras.Input((4,))
    x = keras.layers.Dense(4, own_activation, kernel_initializer=OwnStart())(
        inputs
    )
    for power in (1.0, 2.0):
        # The global is this script's, the variable this function's.
        x = keras.layers.Lambda(lambda t, p=power: scaled(t) / p)(x)
    x = keras.layers.Lambda(own_activation)(x)
    return keras.Model(inputs, keras.layers.Dense(1)(x))


def test_a_copy_computes_with_the_scripts_own_code():
    model = own_parts()
    model.compile("sgd", OwnLoss(), metrics=[own_metric])
    twin = convert.convert_model(model, "mixed_bfloat16")
    helpers.assert_close(twin(X), model(X), "bfloat16")
    names = {getattr(x, "function", None) for x in twin.layers}
    assert own_activation in names
    y = np.ones((8, 1), "float32")
    found = twin.evaluate(X, y, verbose=0, return_dict=True)
    expected = model.evaluate(X, y, verbose=0, return_dict=True)
    assert set(found) == {"loss", "own_metric"}
    for name, value in found.items():
        assert value == pytest.approx(expected[name], rel=0.05)


def test_rules_and_maps_find_nested_layers_of_a_copy_by_their_path():
    inner = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(4, name="one")], name="inner"
    )
    inputs = keras.Input((4,))
    outputs = keras.layers.Dense(2)(keras.layers.Dense(4)(inner(inputs)))
    model = keras.Model(inputs, outputs)
    chosen = keras.dtype_policies.DTypePolicyMap(default_policy="mixed_float16")
    chosen["inner/one"] = keras.DTypePolicy("mixed_bfloat16")
    ruled = policies.Policy("mixed_float16", float32_layers=["inner/.*"])
    for policy, dtype in ((chosen, "bfloat16"), (ruled, "float32")):
        twin = convert.convert_model(model, policy)
        one = twin.get_layer("inner").get_layer("one")
        assert one.compute_dtype == dtype
        assert twin.layers[2].compute_dtype == "float16"


def keras_functions():
    registration = importlib.import_module("keras.src.saving")
    python = importlib.import_module("keras.src.utils.python_utils")
    return [
        registration.object_registration.get_registered_name,
        python.func_dump,
        python.func_load,
    ]


def test_keras_is_as_before_after_a_copy_that_failed():
    before = keras_functions()
    seen = []

    def fail():
        with own_code.kept_at_hand():
            seen.extend(keras_functions())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    for inside, then in zip(seen, before, strict=True):
        assert inside is not then
    for now, then in zip(keras_functions(), before, strict=True):
        assert now is then


def test_what_another_thread_saves_meanwhile_is_kerass_own():
    found = []

    def dump():
        code, _, _ = keras_functions()[1](lambda x: x)
        found.append(code)

    with own_code.kept_at_hand() as own:
        thread = threading.Thread(target=dump)
        thread.start()
        thread.join()
        mine, _, _ = keras_functions()[1](scaled)
        assert keras_functions()[2](mine) is scaled
    assert found[0] != mine
    assert own == {}
    assert keras_functions()[2](found[0])(2) == 2


@pytest.mark.filterwarnings("ignore:Skipping nested container")
def test_what_keras_cannot_copy_is_said_with_the_cause():
    shared = keras.layers.Dense(4)
    tower = keras.Sequential([keras.Input((4,)), shared])
    inputs = keras.Input((4,))
    model = keras.Model(inputs, shared(tower(inputs)))
    with pytest.raises(TypeError) as caught:
        convert.convert_model(model, "mixed_float16")
    message = str(caught.value)
    assert "expected 2 variables, but received 0" in message
    assert "convert it in place: apply_policy(model, policy)" in message
    # Nothing of the user's could be given a `get_config` here.
    assert "get_config" not in message


def test_a_copy_that_lost_its_weights_is_none():
    class Forgetful(keras.layers.Dense):
        def load_own_variables(self, store):
            pass

    model = keras.Sequential([keras.Input((4,)), Forgetful(2)])
    with pytest.raises(TypeError, match="other weights than the model"):
        convert.convert_model(model, "mixed_float16")


def test_a_class_that_cannot_be_copied_is_named():
    class NoConfig(keras.layers.Layer):
        def __init__(self, needed, **kwargs):
            super().__init__(**kwargs)
            self.dense = keras.layers.Dense(needed.units)

        def call(self, x):
            return self.dense(x)

    units = type("Units", (), {"units": 2})()
    model = keras.Sequential([keras.Input((4,)), NoConfig(units)])
    with pytest.raises(TypeError, match="Give NoConfig a `get_config`"):
        convert.convert_model(model, "mixed_float16")
