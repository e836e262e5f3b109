"""The README's first screen has a script that runs, and two commands."""

import re

import keras
import numpy as np
import pytest

from tests.tree import ROOT

FIRST_SCREEN = 30  # lines


def readme():
    return (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(text, language):
    """Returns the fenced blocks of one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


def run_blocks(text):
    """Runs the python blocks one after the other, like a reader."""
    random = np.random.default_rng(0)
    names = {
        "x": random.normal(size=(64, 20)).astype("float32"),
        "y": random.integers(0, 10, size=64),
    }
    for number, block in enumerate(blocks(text, "python")):
        if "tf." in block and keras.backend.backend() != "tensorflow":
            continue
        exec(compile(block, f"README block {number}", "exec"), names)
    return names


def test_the_first_screen_shows_the_script_and_the_two_commands():
    first = "\n".join(readme().splitlines()[:FIRST_SCREEN])
    (script,) = blocks(first, "python")
    assert "tfmix.set_global_policy" in script
    assert "model.fit" in script
    (commands,) = blocks(first, "sh")
    assert "make demo" in commands
    assert "make test" in commands


@pytest.mark.costly
def test_the_script_runs_and_trains_in_float16():
    names = run_blocks(readme())
    model = names["model"]
    assert keras.backend.standardize_dtype(model.layers[0].compute_dtype) == (
        "float16"
    )
    assert model.layers[-1].compute_dtype == "float32"
    assert int(model.optimizer.iterations) + model.optimizer.skipped_steps == 2


def test_a_script_that_fails_is_found():
    with pytest.raises(NameError, match="nowhere"):
        run_blocks("```python\nx + nowhere\n```\n")


def test_the_make_targets_it_names_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"\bmake ([a-z][a-z-]*)", readme()))
    assert {"demo", "test"} <= named
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.M), target
