"""The README has scripts that run, and tables of what was measured."""

import json
import re
import runpy

import keras
import numpy as np
import pytest

from tests import helpers, processes
from tests.project import test_docs
from tests.tree import ROOT

FIRST_SCREEN = 55  # lines


def readme():
    return (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(text, language):
    """Returns the fenced blocks of one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


def changed(before, diff):
    """Returns a script with the lines that a diff adds after those it shows.

    A diff without a script has both.
    """
    old = [line[1:] for line in diff.splitlines() if not line.startswith("+")]
    new = [line[1:] for line in diff.splitlines() if not line.startswith("-")]
    whole = before or "\n".join(old)
    assert whole.count("\n".join(old)) == 1
    return whole.replace("\n".join(old), "\n".join(new))


def scripts():
    """Returns the script before and after the lines of the second diff."""
    _, diff = blocks(readme(), "diff")
    lines = diff.splitlines()
    before = [line[1:] for line in lines if not line.startswith("+")]
    return "\n".join(before), changed("", diff)


def first_scripts():
    """Returns the first script for each row of the table of its losses."""
    script, *_ = blocks(readme(), "python")
    diff, _ = blocks(readme(), "diff")
    return {
        'with `"float32"` instead': script.replace("mixed_float16", "float32"),
        "as it is: Keras's policy": script,
        "with the line: tfmix's policy": changed(script, diff),
    }


def test_the_first_screen_has_a_script_and_what_was_not_shown():
    first = "\n".join(readme().splitlines()[:FIRST_SCREEN])
    for phrase in (
        "has not run on a GPU under TensorFlow, nor on a T4\nor V100",
        *("**Is it for you?**", "**What does it cost?**", "pip install ."),
    ):
        assert phrase in first
    script, *_ = first_scripts().values()
    assert len(script.splitlines()) <= 12
    for one, ours in zip(first_scripts().values(), (0, 0, 1), strict=True):
        assert ("tfmix" in one) == ours
    before, after = scripts()
    assert "tfmix" not in before
    assert "tfmix.set_global_policy" in after


def losses(script, alone):
    """Returns the losses of a script's epochs.

    Args:
        script: The script.
        alone: Whether to run it in a process of its own, without tfmix.
    """
    if alone:
        script += "print('RESULT', model.history.history['loss'])"
        done = processes.python("-c", script, check=True)
        return re.findall(r"[\d.]+|nan", done.stdout.partition("RESULT")[2])
    names = {}
    exec(script, names)
    return names["model"].history.history["loss"]


@helpers.requires_backend("tensorflow")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=[pytest.mark.slow] if "Keras's" in name else []
        )
        for name in first_scripts()
    ],
)
def test_the_first_script_has_the_losses_that_the_readme_says(name):
    table = test_docs.columns(readme(), "| loss of each epoch |")
    found = losses(first_scripts()[name], alone="Keras's" in name)
    shown = [float(cell) for cell in table[name]]
    assert [float(one) for one in found] == pytest.approx(
        shown, abs=0.01, nan_ok=True
    )


def test_code_and_sentences_fit_eighty_columns():
    long = [line for line in readme().splitlines() if len(line) > 80]
    assert not [line for line in long if not line.startswith(("|", "!", "["))]


def test_the_commands_follow():
    trying, contribute = blocks(readme(), "sh")
    assert trying.startswith("pip install .")
    assert "\ntfmix run --against float32 " in trying
    assert "make demo" in contribute
    assert "make test" in contribute


def tables_of(name):
    path = ROOT / "docs" / "benchmarks" / f"{name}.json"
    return json.loads(path.read_text("utf-8"))["tables"]


def rows_of(name, table=0):
    return tables_of(name)[table]["rows"]


def timed(model, precision, library="keras"):
    """Returns a measured time as the table shows it."""
    (float32,) = rows_of("gpu-h100-jax")
    rows = [{**float32, "library": "keras", "ms a step": float32["Keras, ms"]}]
    for row in [*rows, *rows_of("gpu-jax")]:
        place = row["model, batch"], row["precision"], row["library"]
        if (
            place == (model, precision, library)
            and row.get("optimizer", "adam") == "adam"
        ):
            return f"{row['ms a step']['median']:.1f}"
    return "not timed"


TRANSFORMER = "transformer, 16384 tokens"
TIMED = {
    "transformer": (TRANSFORMER, "mixed_bfloat16"),
    "the same": (TRANSFORMER, "mixed_float16"),
    "ResNet-50": ("ResNet-50, 256 x 224 x 224", "mixed_bfloat16"),
    "four Llama": ("four Llama-3-8B blocks, 4096 tokens", "mixed_float8"),
}
SCORED = {"scanned digits": "three_lines", "language of a": "languages"}


def gains():
    part = readme().partition("## What you gain")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in part.splitlines()]
    return {row[0]: row[1:] for row in rows if len(row) == 4}


@pytest.mark.parametrize("start", TIMED)
def test_the_table_says_the_times_that_were_measured(start):
    (row,) = [row for name, row in gains().items() if name.startswith(start)]
    model, precision = TIMED[start]
    assert row == [
        timed(model, "float32 (TF32)"),
        timed(model, precision),
        timed(model, precision, "tfmix"),
    ]


@pytest.mark.parametrize("start", SCORED)
def test_the_table_says_the_results_that_were_measured(start):
    (row,) = [row for name, row in gains().items() if name.startswith(start)]
    (own,) = [
        each
        for each in rows_of("recipes-tensorflow")
        if each["script"] == SCORED[start]
        and each["variant"] == "mixed_float16"
    ]
    shown = [f"{float(own[c].split()[0]):.1f}" for c in ("float32", "16 bit")]
    assert row == [shown[0], "not run", shown[1]]


def test_the_table_counts_the_tasks_on_real_data():
    (row,) = [row for name, row in gains().items() if "real data" in name]
    tasks = rows_of("real_data-tensorflow")
    worse = [
        f"{sum('worse' in task[way] for task in tasks)} of {len(tasks)}"
        for way in ("Keras, float16", "tfmix, float16")
    ]
    assert row == ["–", *worse]


def test_the_picture_is_drawn_from_the_records():
    pytest.importorskip("matplotlib")
    made = runpy.run_path(str(ROOT / ".ci" / "front_picture.py"))
    panels = made["counted"](ROOT / "docs" / "benchmarks")
    (_, times, _), *counts = panels
    assert [f"{one:.1f}" for one in times.values()] == [
        timed(TRANSFORMER, "mixed_bfloat16", "tfmix"),
        timed(TRANSFORMER, "mixed_bfloat16"),
        timed(TRANSFORMER, "float32 (TF32)"),
    ]
    assert all(set(numbers) == {"Keras", "tfmix"} for _, numbers, _ in counts)


@pytest.mark.costly
def test_the_script_runs_and_trains_in_float16():
    random = np.random.default_rng(0)
    data = {
        "x": random.normal(size=(64, 20)).astype("float32"),
        "y": random.integers(0, 10, size=64),
    }
    before, after = scripts()
    exec(before, dict(data))
    names = test_docs.run_page(f"```python\n{after}\n```\n", "README.md", data)
    model = names["model"]
    assert keras.backend.standardize_dtype(model.layers[0].compute_dtype) == (
        "float16"
    )
    # Its softmax is float32.
    head = model.layers[-1](np.zeros((1, 512), "float32"))
    assert keras.backend.standardize_dtype(head.dtype) == "float32"
    assert int(model.optimizer.iterations) + model.optimizer.skipped_steps == 2
    # The block behind it goes on with the model of the script.
    _, block = blocks(readme(), "python")
    test_docs.run_page(f"```python\n{block}\n```\n", "README.md", names)
