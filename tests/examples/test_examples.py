"""The example scripts run, and train as well as float32."""

import re

import keras
import pytest

pytest.importorskip("sklearn", reason="the examples' data come with it")
pytest.importorskip("statsmodels", reason="and with this")
pytest.importorskip("django", reason="and with this")

from tests.examples import compared
from tests.tree import ROOT

SCRIPTS = sorted(compared.EXAMPLES.glob("*.py"))
BACKEND = keras.backend.backend()


def namespace(name, **constants):
    """Runs a script in this process; returns its names."""
    path = compared.EXAMPLES / f"{name}.py"
    source = compared.with_constants(path.read_text("utf-8"), constants)
    names = {}
    exec(compile(source, str(path), "exec"), names)
    return names


def test_one_epoch_of_three_lines_trains_in_16_bit():
    names = namespace("three_lines", EPOCHS=1)
    first, *_, last = names["model"].layers
    assert (first.compute_dtype, first.kernel.dtype) == ("float16", "float32")
    assert last.compute_dtype == "float32"
    assert names["accuracy"] > 0.4


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_needs_nothing_but_tfmix_and_its_data(path):
    source = path.read_text("utf-8")
    found = re.findall(r"^\s*(?:import|from) ([\w.]+)", source, re.M)
    tops = {module.split(".")[0] for module in found}
    data = {"django", "sklearn", "statsmodels"}
    host = {"jax", "keras", "numpy", "tensorflow", "tfmix"}
    standard = {"contextlib", "math", "os", "pathlib", "re"}
    assert "tfmix" in found
    assert not tops - data - host - standard
    # Users import tfmix, and none of its modules.
    assert not [name for name in found if name.startswith("tfmix.")]
    assert len(source.splitlines()) <= 90


def test_every_script_is_compared_and_the_readme_leads_to_them():
    names = {path.stem for path in SCRIPTS}
    assert {one.script for one in compared.COMPARISONS.values()} == names
    assert "(examples)" in (ROOT / "README.md").read_text("utf-8")


def test_an_unknown_constant_of_a_script_is_refused():
    with pytest.raises(ValueError, match="POLICE"):
        compared.with_constants("POLICY = 1\n", {"POLICE": 2})


@pytest.mark.slow
@pytest.mark.skipif(BACKEND != "tensorflow", reason="each names its backend")
@pytest.mark.parametrize("name", compared.COMPARISONS)
def test_16_bit_is_as_good_as_float32_within_the_noise_or_a_point(name):
    comparison = compared.COMPARISONS[name]
    runs = compared.run_all(comparison)
    baseline = compared.scores(next(iter(runs.values())))
    for own in runs.values():
        found = compared.scores(own)
        distance, noise = compared.gap(found, baseline)
        assert min(found) >= 100 * comparison.least, runs
        assert abs(distance) <= max(noise, 1.0), runs
        # One row is not finite, in each of four epochs; all processes skip it.
        assert {run.get("steps skipped", 4) for run in own} == {4}, runs
        assert {run.get("batches lost", 0) for run in own} == {0}, runs
