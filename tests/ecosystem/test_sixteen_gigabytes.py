"""The recipe for a large transformer runs, and fits on 16 GB."""

import pytest

from tests import helpers
from tests.ecosystem import sixteen_gigabytes
from tests.tools.hardware import programs
from tfmix.tools.hardware import target as targets

pytest.importorskip("keras_hub")
# This is KerasHub's warning: it passes masks to layers without masks.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    # Gemma's blocks get keyword arguments, which TensorFlow's recompute_grad
    # does not accept in a graph.
    helpers.requires_backend("jax"),
]


@pytest.fixture(scope="module")
def recipe():
    return sixteen_gigabytes.recipe()


def test_frozen_weights_take_two_bytes_and_adapters_are_in_float32(recipe):
    model = recipe["model"]
    frozen = [v for v in model.non_trainable_variables if len(v.shape) > 1]
    assert {v.dtype for v in frozen} == {"float16"}
    adapters = [v for v in model.trainable_variables if "lora" in v.path]
    assert {v.dtype for v in adapters} == {"float32"}
    assert model.layers[-1].compute_dtype == "float32"
    assert int(model.optimizer.iterations) > 0


@pytest.mark.slow
def test_gemma_2b_needs_40_gb_under_keras_and_fits_a_t4():
    programs.skip_without("t4")
    steps = sixteen_gigabytes.both(sixteen_gigabytes.GEMMA_2B)
    assert steps["Keras"].memory.peak > 38e9
    assert steps["recipe"].memory.peak < targets.find("t4").memory
