"""Presets can be loaded under a policy.

The presets are created here, in float32: those of KerasHub need a download.
"""

import pytest

import tfmix
from tests import helpers
from tests.ecosystem import small_models
from tests.ecosystem.small_models import BOUNDS, models

pytestmark = [
    helpers.requires_backend("tensorflow"),
    # This is KerasHub's warning: a preset's optimizer has no variables yet.
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
# Dropout is off, because it would draw other numbers in 16 bit.
TASKS = {
    "BertTextClassifier": ("BertBackbone", {"num_classes": 2, "dropout": 0.0}),
    "GPT2CausalLM": ("GPT2Backbone", {}),
    "ViTImageClassifier": ("ViTBackbone", {"num_classes": 2}),
}
# The largest allowed errors of results.
ERRORS = {**BOUNDS, "float16": BOUNDS["mixed_float16"]}
WEIGHTS = {"float16": "float16"}


@pytest.fixture(params=TASKS)
def name(request):
    return request.param


@pytest.fixture
def preset(name, tmp_path):
    backbone, given = TASKS[name]
    changes = {} if name == "ViTImageClassifier" else {"dropout": 0.0}
    made = small_models.make_model(backbone, "float32", **changes)
    task = getattr(models, name)(made, preprocessor=None, **given)
    task.save_to_preset(str(tmp_path))
    return str(tmp_path)


def loaded(name, preset, policy, **given):
    with tfmix.policy_scope(policy):
        kind = getattr(models, name)
        return kind.from_preset(preset, preprocessor=None, **given)


def floats(variables):
    return {v.dtype for v in variables if "float" in v.dtype}


@pytest.mark.parametrize("policy", ERRORS)
def test_a_preset_computes_in_the_policy_as_in_float32(
    name, preset, policy, record_property
):
    inputs = small_models.batch(TASKS[name][0])
    exact = small_models.results(loaded(name, preset, "float32"), inputs)
    model = loaded(name, preset, policy)
    narrow = policy.removeprefix("mixed_")
    assert model.backbone.compute_dtype == narrow
    assert floats(model.variables) == {WEIGHTS.get(policy, "float32")}
    assert model(inputs).dtype == "float32"
    (error,) = small_models.errors(model, inputs, exact)
    record_property("error", error)
    assert 0 < error < ERRORS[policy]
