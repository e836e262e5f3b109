"""Training in float8 ends inside the noise of bfloat16's seeds."""

import keras
import numpy as np
import pytest

import tfmix
from tests import helpers
from tests.float8 import test_chosen_layers as digits_model

SEEDS = range(3)
ROWS, HELD_OUT = 1536, 256
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def trained(rules, jit_compile, seed):
    """Returns the loss on held-out pictures, and the report of `check`."""
    x, y = digits_model.digits()
    y = y.astype("int32")
    keras.utils.set_random_seed(seed)
    model = digits_model.classifier(rules)
    adam = keras.optimizers.Adam(3e-3)
    model.compile(adam, LOSS, jit_compile=jit_compile)
    model.fit(x[:ROWS], y[:ROWS], batch_size=48, epochs=6, verbose=0)
    held_out = slice(ROWS, ROWS + HELD_OUT)
    score = model.evaluate(
        x[held_out], y[held_out], batch_size=HELD_OUT, verbose=0
    )
    return score, tfmix.check(model, x[:32], y[:32], loss=LOSS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "jit_compile", [True] if helpers.ON_JAX else [False, True]
)
def test_three_seeds_end_inside_the_noise_of_bfloat16(jit_compile):
    scores = {}
    for rules in ("mixed_bfloat16", digits_model.policy()):
        runs = [trained(rules, jit_compile, seed) for seed in SEEDS]
        scores[str(rules)] = np.array([score for score, _ in runs])
    # These are the last runs, in float8.
    for _, report in runs:
        assert report.healthy, str(report)
    sixteen, eight = scores.values()
    assert abs(eight.mean() - sixteen.mean()) <= np.ptp(sixteen)
