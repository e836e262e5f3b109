"""The loop of one's own: every variant learns, and no batch is lost."""

import dataclasses

import pytest

from examples import training_loop
from tests import helpers


@helpers.requires_backend("tensorflow")
def test_every_variant_learns_and_a_retried_batch_is_not_lost():
    runs = training_loop.run(epochs=4, seeds=1, quiet=True)
    assert [run.variant for run in runs] == [
        variant.name for variant in training_loop.VARIANTS
    ]
    for run in runs:
        assert run.applied == run.batches > 0
        assert run.accuracy > 0.9
    whole = runs[-1]
    # It starts at a scale that must overflow, which costs tries, not batches.
    assert whole.skipped_steps > 0
    assert whole.loss_scale == 2.0**24 / 2**whole.skipped_steps
    assert training_loop.drawn(runs).row_count == len(runs)


def test_a_variant_that_learns_less_shows_in_the_gap():
    same = [
        training_loop.Run(variant.name, 0, 0.9, 10, 10, 0, 1.0)
        for variant in training_loop.VARIANTS
    ]
    assert training_loop.gap(same) == 0.0
    worse = [*same[:-1], dataclasses.replace(same[-1], accuracy=0.8)]
    assert training_loop.gap(worse) > training_loop.LARGEST_GAP


@helpers.requires_backend("jax")
def test_the_other_backend_is_refused_with_the_way_out():
    with pytest.raises(RuntimeError, match="KERAS_BACKEND=tensorflow"):
        training_loop.run(epochs=1, seeds=1, quiet=True)
