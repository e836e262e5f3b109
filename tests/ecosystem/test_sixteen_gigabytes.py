"""The recipe for a large transformer on 16 GB trains as float32 does."""

import keras
import numpy as np
import pytest

from tests import test_docs

pytest.importorskip("keras_hub")
# KerasHub's own: masks that layers are handed and do not take.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
PAGE = test_docs.DOCS / "recipes" / "sixteen-gigabytes.md"
SEEDS = (1, 2, 3)


@pytest.fixture(scope="module")
def recipe():
    """Runs the page; returns its names."""
    text = PAGE.read_text(encoding="utf-8").replace("```py\n", "```python\n")
    return test_docs.run_page(text, str(PAGE))


def test_frozen_weights_take_two_bytes_and_adapters_are_in_float32(recipe):
    model = recipe["model"]
    frozen = [v for v in model.non_trainable_variables if len(v.shape) > 1]
    assert {v.dtype for v in frozen} == {"float16"}
    adapters = [v for v in model.trainable_variables if "lora" in v.path]
    assert {v.dtype for v in adapters} == {"float32"}
    assert model.layers[-1].compute_dtype == "float32"
    assert int(model.optimizer.iterations) > 0


def held_out_loss(recipe, policy, optimizer, seed):
    keras.utils.set_random_seed(seed)
    model = recipe["classifier"](recipe["small"], policy, length=16)
    model.compile(optimizer, loss=recipe["loss"])
    ids = np.random.default_rng(seed).integers(1, 64, (1536, 16))
    batch = {
        "token_ids": ids,
        "segment_ids": np.zeros_like(ids),
        "padding_mask": np.ones_like(ids),
    }
    first = {name: values[:1024] for name, values in batch.items()}
    rest = {name: values[1024:] for name, values in batch.items()}
    y = ids[:, 0] < 32
    model.fit(first, y[:1024], batch_size=32, epochs=4, verbose=0)
    return model.evaluate(rest, y[1024:], batch_size=128, verbose=0)


@pytest.mark.slow
def test_the_loss_is_inside_the_noise_of_float32(recipe):
    exact = [
        held_out_loss(recipe, "float32", keras.optimizers.Adam(3e-3), seed)
        for seed in SEEDS
    ]
    narrow = [
        held_out_loss(recipe, "float16", recipe["adam"](3e-3), seed)
        for seed in SEEDS
    ]
    assert np.max(exact) < 0.67, "nothing was learned"
    assert abs(np.mean(narrow) - np.mean(exact)) < np.ptp(exact)
