"""The loop of one's own: every variant learns, and no batch is lost."""

import keras
import numpy as np
import pytest

pytest.importorskip("sklearn", reason="the example's data come with it")

from tests import helpers
from tfmix.examples import common, training_loop, updater

X = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
Y = np.arange(8) % 3


@pytest.fixture(autouse=True)
def one_strategy(monkeypatch):
    """Takes the test run's MirroredStrategy instead of a second one."""
    monkeypatch.setattr(training_loop, "strategy", helpers.mirrored_strategy)


def made(**arguments):
    """Returns an updater of a small linear model that starts at a scale."""
    import tfmix

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    rule = tfmix.DynamicLossScale(initial_scale=4.0, min_scale=2.0**-40)
    return updater.Updater(
        model,
        tfmix.LossScaleOptimizer(keras.optimizers.SGD(0.1), loss_scale=rule),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        **arguments,
    )


def test_a_batch_that_always_overflows_is_tried_so_often_and_no_more():
    training = made(retries=2)
    before = training.model.get_weights()
    _, applied = training.update(X * np.inf, Y)
    assert applied is False
    assert training.optimizer.skipped_steps == 3
    assert training.optimizer.loss_scale == 4.0 / 2**3
    for old, new in zip(before, training.model.get_weights(), strict=True):
        helpers.assert_same_bits(new, old)
    assert training.update(X, Y)[1] is True


def test_replicas_take_the_step_of_the_whole_batch():
    alone = made()
    weights = alone.model.get_weights()
    loss, _ = alone.update(X, Y)
    with training_loop.replicas():
        together = made()
        together.model.set_weights(weights)
        same, _ = together.update(X, Y)
        got = [np.array(v) for v in together.model.get_weights()]
    helpers.assert_close(same, loss, "float32")
    for one, other in zip(got, alone.model.get_weights(), strict=True):
        helpers.assert_close(one, other, "float32")


@helpers.requires_backend("tensorflow")  # JAX: in the slow test.
def test_one_epoch_all_in_one_loses_no_batch():
    run = training_loop.train("all in one", 0, 1, lambda loss: None)
    assert run.columns["lost\nbatches"] == 0
    # Not even at the highest scale, which the model's border takes off.
    assert run.columns["skipped\nsteps"] == 0
    assert run.curve[-1] == 2.0**24
    assert len(run.curve) == 1257 // training_loop.BATCH_SIZE
    assert run.score > 0.4


def test_the_distribution_ends_with_its_block():
    before = keras.distribution.distribution()
    with training_loop.replicas():
        pass
    assert keras.distribution.distribution() is before


@pytest.mark.slow
def test_every_variant_is_as_good_as_its_twin(tmp_path):
    outcome = training_loop.RECIPE.run(quiet=True, out=str(tmp_path))
    assert outcome.healthy, common.drawn(outcome)
    assert len(outcome.runs) == 15
    # Fast enough growth to meet the ceiling.
    curve = outcome.of("dynamic scale")[0].curve
    assert max(curve) == 2.0**24
    assert (tmp_path / "training_loop.png").is_file()
