"""The GAN that somebody would copy: one line, and what it gives."""

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="the example's data come with it")
pytest.importorskip("tensorflow", reason="its train step is TensorFlow's")

from tests import helpers
from tfmix.examples import gan

pytestmark = helpers.requires_backend("tensorflow")


def test_each_optimizer_skips_what_is_not_finite_by_itself():
    pair = gan.train("mixed_float16", epochs=1)
    networks = pair.generator, pair.discriminator
    computed = {layer.compute_dtype for n in networks for layer in n.layers}
    assert computed == {"float16"}
    kept = [*pair.discriminator.variables, *pair.d_optimizer.variables]
    before = helpers.snapshot(kept)
    pixels = np.full((64, 64), np.inf, "float32")
    pair.fit(pixels, np.eye(64, 10), batch_size=64, verbose=0)
    helpers.assert_unchanged(kept, before)
    # The generator, which saw none of these pixels, was trained.
    assert int(pair.g_optimizer.iterations) == 30
    helpers.assert_all_finite([v.numpy() for v in pair.generator.variables])


@pytest.mark.slow
def test_its_losses_are_those_of_float32():
    found = gan.train("mixed_float16", epochs=1).history.history
    exact = gan.train("float32", epochs=1).history.history
    for name, losses in exact.items():
        np.testing.assert_allclose(found[name], losses, rtol=0.05)


@pytest.mark.slow
def test_what_it_draws_can_be_read():
    assert gan.score(gan.train("mixed_float16")) > 0.85
