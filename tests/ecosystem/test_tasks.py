"""KerasHub's tasks, which compile themselves, train, save and load."""

import keras
import numpy as np
import pytest

import tfmix
from tests.ecosystem import small_models
from tests.ecosystem.small_models import models

pytestmark = [
    # These are KerasHub's warnings: its data is shuffled already, and its
    # tasks' optimizers are not restored.
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
X = {
    "token_ids": np.random.default_rng(0).integers(1, 30, (8, 8)),
    "padding_mask": np.ones((8, 8), "int32"),
    "segment_ids": np.zeros((8, 8), "int32"),
}
Y = np.arange(8) % 2


def classifier():
    backbone = small_models.build("BertBackbone", max_sequence_length=8)
    return models.BertTextClassifier(
        backbone=backbone, num_classes=2, preprocessor=None
    )


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_a_task_created_under_a_policy_trains_and_loads(policy, tmp_path):
    tfmix.set_global_policy(policy)
    task = classifier()
    assert isinstance(task.optimizer, tfmix.LossScaleOptimizer)
    task.fit(X, Y, verbose=0)
    task.save(tmp_path / "task.keras")
    again = keras.saving.load_model(tmp_path / "task.keras")
    assert isinstance(again.optimizer, tfmix.LossScaleOptimizer)
    expected = task.predict(X, verbose=0)
    np.testing.assert_array_equal(again.predict(X, verbose=0), expected)


def test_a_converted_task_returns_float32_and_trains(caplog):
    task = classifier()
    report = tfmix.apply_policy(task, "mixed_float16")
    after = {row.layer.split("/")[-1]: row.after for row in report.rows}
    assert after["logits"] == "float32"
    assert after["pooled_dense"] == "mixed_float16"
    task.fit(X, Y, verbose=0)
    assert isinstance(task.optimizer, tfmix.LossScaleOptimizer)
    assert not [text for text in caplog.messages if "Output" in text]


def test_a_quantized_backbone_is_adapted_saved_and_loaded(tmp_path):
    with tfmix.policy_scope("mixed_bfloat16"):
        task = classifier()
        task.backbone.quantize("int8")
        task.backbone.enable_lora(2)
        task.compile("adam", "sparse_categorical_crossentropy")
    task.fit(X, Y, verbose=0)
    assert {v.dtype for v in task.variables} >= {"int8", "float32"}
    task.save(tmp_path / "task.keras")
    with tfmix.policy_scope("mixed_bfloat16"):
        # Layers that a block creates itself get the active policy.
        again = keras.saving.load_model(tmp_path / "task.keras")
    expected = task.predict(X, verbose=0)
    np.testing.assert_array_equal(again.predict(X, verbose=0), expected)
