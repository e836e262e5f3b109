"""Compiles whole models of `keras.applications`, and a transformer.

Run `pytest --all tests/hardware` in the environment of `make targets`. It
takes ten minutes per backend.
"""

import keras
import pytest

import tfmix
from benchmarks import compiled_steps, gpu_models
from tests import helpers
from tests.hardware import programs

ON_JAX = keras.backend.backend() == "jax"
APPLICATIONS = (
    *("ResNet50", "VGG16", "MobileNetV2", "EfficientNetB0", "ConvNeXtTiny"),
)


def model_of(name):
    if name == "transformer":
        return gpu_models.transformer(**compiled_steps.TRANSFORMER)
    return getattr(keras.applications, name)(weights=None, classes=100)


# Several devices need JAX. TensorFlow compiles the share of one device.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "rows", "devices"),
    [("h200", 32, 1), ("v5e", 32, 4) if ON_JAX else ("v5e", 8, 1)],
    ids=["h200", "v5e"],
)
@pytest.mark.parametrize("name", [*APPLICATIONS, "transformer"])
def test_a_whole_model_compiles(name, target, rows, devices, monkeypatch):
    programs.skip_without(target)
    analyses = programs.recorded(monkeypatch)
    model = model_of(name)
    step = tfmix.hardware.compile_for(
        model,
        rows,
        target,
        devices=devices,
        loss="sparse_categorical_crossentropy",
        policy="mixed_bfloat16",
    )
    ((_, analysis, _),) = analyses
    given = analysis.argument_size_in_bytes
    results = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    assert step.memory.arguments == given
    assert step.memory.temporaries == analysis.temp_size_in_bytes
    assert step.memory.peak == given + step.memory.temporaries + results
    weights = 4 * model.count_params()
    # Seeds of dropout may come on top.
    assert weights <= step.memory.kinds.weights <= weights + 1000
    # Only trainable weights have Adam's moments.
    assert 1.9 * weights <= step.memory.kinds.slots <= 2 * weights
    assert step.share_16bit > 0.9
    assert all(step.float32_layers), "a product in float32 without a layer"
    # A step computes each product forward and for both gradients, but only one
    # gradient for the first layer. `advise` does not count depthwise
    # convolutions.
    forward = sum(row.flops for row in tfmix.hardware.advise(model, rows).rows)
    assert 2.5 <= step.flops * devices / forward <= 3.4


@pytest.mark.slow
@helpers.requires_backend("jax")
def test_scaling_a_transformer_takes_no_memory_and_few_kernels():
    programs.skip_without("h200")
    bare, kerass, ours = (
        compiled_steps.transformer("mixed_float16", way, "h200")
        for way in ("bare", "Keras", "tfmix")
    )
    assert ours.memory.temporaries <= 1.02 * bare.memory.temporaries
    added = ours.kernels - bare.kernels
    assert added <= (kerass.kernels - bare.kernels) / 3
