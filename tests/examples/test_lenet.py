"""LeNet-5 by level and by hand: the dtypes, the given scale, the claim."""

import keras
import numpy as np
import pytest

pytest.importorskip("sklearn", reason="the example's data come with it")

from tests import helpers
from tfmix.examples import lenet

SGD = keras.optimizers.SGD


def test_by_hand_only_the_last_dense_layer_is_float32():
    model, optimizer = lenet.by_hand(SGD())
    *body, head = [layer.compute_dtype for layer in model.layers]
    assert set(body) == {"float16"}
    assert head == "float32"
    assert {weight.dtype for weight in model.weights} == {"float32"}
    assert optimizer.loss_scale == lenet.SCALES[0]


@pytest.mark.parametrize(
    ("level", "conv", "pool", "weights"),
    [
        ("O0", "float32", "float32", "float32"),
        ("O1", "float16", "float32", "float32"),
        ("O2", "float16", "float16", "float32"),
        ("O3", "float16", "float16", "float16"),
    ],
)
def test_each_level_is_one_call(level, conv, pool, weights):
    model, _ = lenet.by_level(level, SGD())
    assert model.layers[1].compute_dtype == conv
    assert model.layers[2].compute_dtype == pool
    assert model.layers[1].kernel.dtype == weights
    # What the loss sees is float32 at every level.
    assert model.layers[-1].compute_dtype == "float32"


def test_a_given_scale_is_used_as_given_and_bad_steps_are_skipped():
    model, optimizer = lenet.by_hand(SGD())
    weight = keras.Variable([1.0])
    optimizer.build([weight])
    helpers.takes_scaled_gradients(optimizer)
    for scale in (8.0, 32.0, 2.0**20):
        optimizer.loss_scale = scale
        assert float(optimizer.scale_loss(0.5)) == scale / 2
        optimizer.apply([keras.ops.array([np.inf])], [weight])
        assert optimizer.loss_scale == scale
        optimizer.apply([keras.ops.array([scale])], [weight])
    assert optimizer.skipped_steps == 3
    # Each good step took 0.01, SGD's default rate, times a gradient of one.
    assert float(weight.numpy()[0]) == pytest.approx(0.97)


def test_the_scale_of_each_step_is_asked_for_by_its_number():
    model, optimizer = lenet.by_hand(SGD())
    model.compile(optimizer, loss="mse")
    asked = []

    def scale_of(step):
        asked.append(step)
        return 2.0 ** (step + 1)

    giver = lenet.GiveScale(scale_of)
    giver.set_model(model)
    for batch in (0, 1, 0):
        giver.on_train_batch_begin(batch)
    assert asked == [0, 1, 2]
    assert optimizer.loss_scale == 8.0


@pytest.mark.slow
def test_every_level_and_the_hand_are_as_good_as_float32(tmp_path):
    outcome = lenet.RECIPE.run(quiet=True, out=str(tmp_path))
    assert outcome.healthy, [outcome.claims, outcome.runs]
    assert len(outcome.runs) == 15
    assert (tmp_path / "lenet.png").is_file()
