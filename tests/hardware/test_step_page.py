"""The page of a compiled step shows versions and every product."""

import dataclasses

import keras

import tfmix
from tfmix.tools.hardware import compiled_step, training_memory

STEP = compiled_step.CompiledStep(
    rows=(
        compiled_step.CompiledProduct(
            "first", "forward", (8, 16, 24), 1, "float16", "Triton", 6144
        ),
    ),
    kernels=3,
    copies=1,
    conditionals=0,
    memory=compiled_step.StepMemory(
        10, 20, 30, 40, training_memory.Memory(4, 0, 6, 4, 16)
    ),
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


def page_of(report, tmp_path):
    report.to_html(tmp_path / "page.html")
    return (tmp_path / "page.html").read_text(encoding="utf-8")


def test_the_page_names_model_and_versions_and_scrolls_on_a_phone(tmp_path):
    page = page_of(STEP, tmp_path)
    versions = f"Keras {keras.__version__}", f"tfmix {tfmix.__version__}"
    for known in ("my_model", *versions, 'name="viewport"', "overflow-x: auto"):
        assert known in page


def test_a_product_of_integers_does_not_count_as_float32():
    # A TPU adds up a mask in this way.
    (row,) = STEP.rows
    mask = dataclasses.replace(row, layer="", dtype="int32/pred")
    wide = dataclasses.replace(row, layer="last", dtype="bfloat16/float32")
    step = dataclasses.replace(STEP, rows=(row, mask, wide))
    assert step.float32_layers == ("last",)


def test_memory_is_shown_by_kind():
    said = str(STEP)
    kinds = ("weights", "masters", "optimizer state", "gradients")
    assert all(f"{kind}, MB" in said for kind in kinds)
