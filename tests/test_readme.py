"""The README's first screen has a script that runs, and two commands."""

import json
import re

import keras
import numpy as np
import pytest

from tests import test_docs
from tests.tree import ROOT
from tfmix._run import report as run_report

FIRST_SCREEN = 30  # lines


def readme():
    return (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(text, language):
    """Returns the fenced blocks of one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


def test_the_first_screen_shows_how_to_try_it_and_what_it_prints():
    first = "\n".join(readme().splitlines()[:FIRST_SCREEN])
    (commands,) = blocks(first, "sh")
    assert commands.startswith("pip install .\ntfmix run ")
    (report,) = re.findall(r"^```\n(tfmix run: .*?)^```$", first, re.M | re.S)
    assert max(map(len, report.splitlines())) <= 80
    shown = {line.partition("  ")[0] for line in report.splitlines()}
    assert shown & {*run_report.HEADS} >= {"optimizer steps", "last loss"}


def test_the_script_and_the_two_commands_follow():
    (script, *_) = blocks(readme(), "python")
    assert "tfmix.set_global_policy" in script
    assert "model.fit" in script
    _, commands = blocks(readme(), "sh")
    assert "make demo" in commands
    assert "make test" in commands


def measured():
    """Returns what was measured on a GPU, by model, precision and library."""
    found = {}
    for name, column in (("gpu-h100", "Keras, ms"), ("gpu", "ms a step")):
        path = ROOT / "docs" / "benchmarks" / f"{name}-jax.json"
        for table in json.loads(path.read_text("utf-8"))["tables"]:
            for row in table["rows"]:
                if row.get("optimizer", "adam") == "adam" and column in row:
                    kind = (
                        row["model, batch"].split()[0].strip(","),
                        row["precision"],
                    )
                    found[*kind, row.get("library", "keras")] = (
                        row[column]["median"],
                        row.get("peak, GB"),
                    )
    return found


def test_the_table_of_gains_says_what_was_measured_and_nothing_else():
    gains = readme().partition("## How much it gains")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\w[\w-]+)[ ,].*?\| (.+) \|$", gains, re.M)
    known = measured()
    columns = ("float32 (TF32)", "mixed_float16", "mixed_bfloat16")
    columns += ("mixed_float8",)
    assert [model for model, _ in rows[1:]] == [
        *("transformer", "ResNet-50", "four")
    ]
    for model, text in rows[1:]:
        *cells, memory = text.split(" | ")
        for precision, cell in zip(columns, cells, strict=True):
            library = "keras" if "TF32" in precision else "tfmix"
            was = known.get((model, precision, library))
            assert cell == ("-" if was is None else f"{was[0]:.1f}")
        assert memory == f"{known[model, 'mixed_bfloat16', 'tfmix'][1]:.1f}"
    said = set(
        re.findall(r"(?<![\d.])\d\d\.\d\b", gains.partition("\n\nThe ")[2])
    )
    keras = {f"{v[0]:.1f}" for k, v in known.items() if k[2] == "keras"}
    assert said == keras - {"85.8"}


@pytest.mark.costly
def test_the_script_runs_and_trains_in_float16():
    random = np.random.default_rng(0)
    data = {
        "x": random.normal(size=(64, 20)).astype("float32"),
        "y": random.integers(0, 10, size=64),
    }
    model = test_docs.run_page(readme(), "README.md", data)["model"]
    assert keras.backend.standardize_dtype(model.layers[0].compute_dtype) == (
        "float16"
    )
    assert model.layers[-1].compute_dtype == "float32"
    assert int(model.optimizer.iterations) + model.optimizer.skipped_steps == 2
