"""The diffusion model that somebody would copy: one line, what it gives."""

import numpy as np
import pytest
from keras import layers

pytest.importorskip("sklearn", reason="the example's data come with it")
pytest.importorskip("tensorflow", reason="its train step is TensorFlow's")

from tests import helpers
from tfmix.examples import diffusion

pytestmark = helpers.requires_backend("tensorflow")


def test_a_batch_that_is_not_finite_leaves_network_and_average_alone():
    model = diffusion.train("mixed_float16", epochs=1)
    dense = [x for x in model.network.layers if isinstance(x, layers.Dense)]
    assert {layer.compute_dtype for layer in dense} == {"float16"}
    kept = [*model.network.variables, *model.average.variables]
    before = helpers.snapshot(kept)
    pixels = np.full((64, 64), np.inf, "float32")
    model.fit(pixels, np.eye(64, 10), batch_size=64, verbose=0)
    assert model.optimizer.skipped_steps == 1
    helpers.assert_unchanged(kept, before)


@pytest.mark.slow
def test_its_errors_are_those_of_float32():
    found = diffusion.train("mixed_float16", epochs=2).history.history
    exact = diffusion.train("float32", epochs=2).history.history
    np.testing.assert_allclose(found["error"], exact["error"], rtol=0.01)


@pytest.mark.slow
def test_what_it_draws_can_be_read():
    assert diffusion.score(diffusion.train("mixed_float16")) > 0.7
