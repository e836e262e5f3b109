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
    exchanges=0,
    exchanged=0,
    flops=6144,
    bytes=100,
    open_loops=0,
    seconds=1e-6,
    bound="memory",
    model="my_model",
    policy="mixed_float16",
    target="h200",
    devices=1,
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


def test_the_page_of_several_policies_has_the_same_head(tmp_path):
    other = dataclasses.replace(STEP, policy="float32")
    both = compiled_step.CompiledSteps(
        {"mixed_float16": STEP, "float32": other}
    )
    page = page_of(both, tmp_path)
    assert "Model my_model, " in page
    # The summary is followed by the products of each policy.
    assert page.count("(8, 16, 24)") == 2


def test_a_product_of_integers_does_not_count_as_float32():
    # A TPU adds up a mask in this way.
    (row,) = STEP.rows
    mask = dataclasses.replace(row, layer="", dtype="int32/pred")
    wide = dataclasses.replace(row, layer="last", dtype="bfloat16/float32")
    step = dataclasses.replace(STEP, rows=(row, mask, wide))
    assert step.float32_layers == ("last",)


def test_the_least_memory_that_fits_is_named():
    def fitting(**peaks):
        memory = {
            k: dataclasses.replace(STEP.memory, peak=n)
            for k, n in peaks.items()
        }
        steps = {
            k: dataclasses.replace(STEP, memory=m) for k, m in memory.items()
        }
        return compiled_step.CompiledSteps(steps).fitting

    assert fitting(a=41, b=39, c=40) == "The least memory: b, 0.0 MB."
    assert "None fits" in fitting(a=41)


def test_memory_is_shown_by_kind():
    said = str(STEP)
    kinds = ("weights", "masters", "optimizer state", "gradients")
    assert all(f"{kind}, MB" in said for kind in kinds)
