"""What is replaced is listed and restored, and users wrap it, too."""

import keras
import numpy as np
import pytest

import tfmix
from tfmix._keras import replacing


def wrap(layer, name):
    """Wraps a method as a profiler does; returns a list with its calls."""
    original, calls = getattr(layer, name), []

    def method(*args, **kwargs):
        calls.append(name)
        return original(*args, **kwargs)

    setattr(layer, name, method)
    return calls


def network():
    return keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)]
    )


def train(model):
    x = np.ones((8, 4), "float32")
    model.fit(x, x[:, :1], batch_size=8, epochs=2, verbose=0)


@pytest.mark.parametrize("name", ["call", "train_step", "compute_loss"])
def test_a_wrapped_method_is_wrapped_again(name):
    tfmix.set_global_policy("mixed_float16")
    model = network()
    model.compile("sgd", "mse")
    calls = wrap(model, name)
    model.compile("sgd", "mse")
    train(model)
    assert calls
    assert model.optimizer.skipped_steps == 0
    y = np.full((8, 1), np.nan, "float32")
    before = [v.numpy() for v in model.variables]
    model.fit(np.ones((8, 4)), y, batch_size=8, verbose=0)
    assert model.optimizer.skipped_steps == 1
    for variable, old in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), old)


def test_a_layer_that_the_user_has_wrapped_can_be_converted_and_back():
    tfmix.set_global_policy("mixed_float16")
    model = network()
    layer = model.layers[0]
    calls = wrap(layer, "call")
    report = tfmix.apply_policy(model, "mixed_bfloat16")
    model(np.ones((2, 4)))
    assert calls == ["call"]
    report.undo()
    model(np.ones((2, 4)))
    assert calls == ["call"] * 2


class Owner:
    @staticmethod
    def method():
        return "theirs"

    value = 1


def ours(original):
    return lambda: "ours"


def test_a_place_is_listed_once_until_all_have_restored_it():
    original, place = vars(Owner)["method"], (Owner, "method")
    first, second = replacing.Replacements(), replacing.Replacements()
    before = replacing.replaced()
    other = (Owner, "value")
    first.set({place: ours})
    second.set({place: ours, other: lambda value: value + 1})
    listed = replacing.replaced()
    assert set(listed) - set(before) == {place, other}
    assert listed.count(place) == 1
    assert first.places() == [place]
    assert (Owner.method(), Owner.value) == ("ours", 2)
    second.set({})
    assert Owner.method() == "ours"
    first.set({})
    assert replacing.replaced() == before
    assert vars(Owner)["method"] is original
    assert Owner.value == 1
