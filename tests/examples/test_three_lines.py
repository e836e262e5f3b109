"""Three lines into mixed precision, and what each of them changed."""

import keras
import pytest

pytest.importorskip("sklearn", reason="the example's data come with it")

import tfmix
from tests import helpers
from tfmix.examples import three_lines

# JAX takes its time for each network.
TENSORFLOW = keras.backend.backend() == "tensorflow"


@pytest.mark.parametrize(
    "policy", three_lines.VARIANTS if TENSORFLOW else ("mixed_float16",)
)
def test_the_policy_changes_what_computes_and_nothing_else(policy):
    before = tfmix.global_policy()
    model, optimizer = three_lines.build_model(policy)
    compute = policy.removeprefix("mixed_")
    assert three_lines.dtypes_of(model) == (compute, "float32", "float32")
    scaled = isinstance(optimizer, tfmix.LossScaleOptimizer)
    assert scaled == (policy != "float32")
    assert model.optimizer is optimizer
    assert before.name == "float32"
    assert tfmix.global_policy().name == policy


@helpers.requires_backend("tensorflow")  # JAX: in the slow test.
def test_a_run_leaves_the_policy_as_it_was():
    run = three_lines.train("mixed_float16", 0, 1, lambda loss: None)
    assert tfmix.global_policy().name == "float32"
    assert run.score > 0.4


@pytest.mark.slow
def test_every_policy_is_as_good_as_float32(tmp_path):
    outcome = three_lines.RECIPE.run(quiet=True, out=str(tmp_path))
    assert outcome.healthy, (outcome.claims, outcome.runs)
    assert len(outcome.runs) == 9
    assert (tmp_path / "three_lines.png").is_file()
