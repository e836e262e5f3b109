"""The page of a compiled step: the look and the head of every page."""

import dataclasses

import keras

import tfmix
from tfmix.hardware import compiled_step

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
    exchanges=0,
    exchanged=0,
    flops=6144,
    bytes=100,
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


def test_the_page_names_model_and_versions_and_fits_a_phone(tmp_path):
    page = page_of(STEP, tmp_path)
    head = page.partition("<table>")[0]
    for known in (
        "my_model",
        f"Keras {keras.__version__}",
        f"tfmix {tfmix.__version__}",
        'name="viewport"',
        "attr(data-label)",
    ):
        assert known in head


def test_the_page_of_several_policies_has_the_same_head(tmp_path):
    other = dataclasses.replace(STEP, policy="float32")
    both = compiled_step.CompiledSteps(
        {"mixed_float16": STEP, "float32": other}
    )
    page = page_of(both, tmp_path)
    assert "Model <b>my_model</b>" in page
    assert page.count("<table>") == 3
