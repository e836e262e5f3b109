"""Two networks that train each other, with scales of their own or one."""

import keras
import numpy as np
import pytest

pytest.importorskip("sklearn", reason="the example's data come with it")

from tests import helpers
from tfmix.examples import common, gan


def pair_after(variant, steps):
    inputs, _, labels, _ = common.digits()
    random = np.random.default_rng(0)
    pair = gan.Pair(variant)
    for _ in range(steps):
        pair.step(inputs[:8], gan.one_hot(labels[:8]), random)
    return pair


def test_scales_of_their_own_move_apart_and_one_scale_moves_once():
    apart = gan.optimizers("scales of their own")
    together = gan.optimizers("one scale")
    for critic, generator in (apart, together):
        critic.loss_scale = 8.0
        assert (generator.loss_scale == 8.0) is (critic is together[0])
    assert not hasattr(gan.optimizers("float32")[0], "loss_scale")


@helpers.requires_backend("tensorflow")  # JAX: in the slow test.
def test_a_step_that_overflows_hurts_neither_network():
    keras.utils.set_random_seed(0)
    pair = pair_after("one scale", 1)
    skipped = pair.critic.optimizer.skipped_steps
    assert skipped + pair.both.optimizer.skipped_steps > 0
    assert pair.critic.optimizer.loss_scale < 2.0**24
    weights = pair.critic.get_weights() + pair.generator.get_weights()
    assert all(np.isfinite(one).all() for one in weights)


@pytest.mark.slow
def test_the_critic_does_not_learn_from_the_generators_turn():
    pair = pair_after("float32", 1)
    before = pair.critic.get_weights()
    noise = np.ones((4, gan.NOISE), "float32")
    digit = gan.one_hot(np.arange(4))
    drawn = pair.draw(np.arange(4), np.random.default_rng(0))
    pair.both.train_on_batch([noise, digit], np.ones((4, 1), "float32"))
    for one, other in zip(pair.critic.get_weights(), before, strict=True):
        helpers.assert_same_bits(one, other)
    again = pair.draw(np.arange(4), np.random.default_rng(0))
    assert not np.array_equal(again, drawn)


@pytest.mark.slow
def test_16_bit_draws_as_well_as_float32(tmp_path):
    outcome = gan.RECIPE.run(quiet=True, out=str(tmp_path))
    assert outcome.healthy, [outcome.claims, outcome.runs]
    assert len(outcome.runs) == 9
    assert (tmp_path / "gan.png").is_file()
