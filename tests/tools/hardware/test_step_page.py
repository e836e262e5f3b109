"""The record of a compiled step."""

import dataclasses

from tfmix.tools.hardware import compiled_step

STEP = compiled_step.CompiledStep(
    rows=(
        compiled_step.CompiledProduct(
            "first", "forward", (8, 16, 24), 1, "float16", "Triton", 6144
        ),
    ),
    kernels=3,
    copies=1,
    conditionals=0,
    memory=compiled_step.StepMemory(10, 20, 30, 40),
    flops=6144,
    bytes=100,
    open_loops=0,
    seconds=1e-6,
    bound="memory",
    model="my_model",
    policy="mixed_float16",
    target="h200",
    batch_size=8,
    backend="jax",
)


def test_a_product_of_integers_does_not_count_as_float32():
    # A TPU adds up a mask in this way.
    (row,) = STEP.rows
    mask = dataclasses.replace(row, layer="", dtype="int32/pred")
    wide = dataclasses.replace(row, layer="last", dtype="bfloat16/float32")
    step = dataclasses.replace(STEP, rows=(row, mask, wide))
    assert step.float32_layers == ("last",)
