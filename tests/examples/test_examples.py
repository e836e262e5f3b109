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
# Expressions in a script's names, with their values after one epoch.
SHORT = [
    (
        "three_lines",
        {},
        {
            "model.layers[0].compute_dtype": "float16",
            "model.layers[0].kernel.dtype": "float32",
            "model.layers[-1].compute_dtype": "float32",
            "optimizer is model.optimizer": True,
            "accuracy > 0.4": True,
        },
    ),
    *(
        (
            "levels",
            {"LEVEL": level},
            {
                "[layer.compute_dtype for layer in model.layers[1:3]]": layers,
                "model.layers[1].kernel.dtype": weights,
                "model.layers[-1].compute_dtype": "float32",
            },
        )
        for level, layers, weights in (
            ("O0", ["float32", "float32"], "float32"),
            ("O1", ["float16", "float32"], "float32"),
            ("O2", ["float16", "float16"], "float32"),
            ("O3", ["float16", "float16"], "float16"),
        )
    ),
    (
        "lenet",
        {},
        {
            "{layer.compute_dtype for layer in model.layers[:-1]}": {"float16"},
            "model.layers[-1].compute_dtype": "float32",
            "{weight.dtype for weight in model.weights}": {"float32"},
            "optimizer.loss_scale": 1024.0,
        },
    ),
    (
        "one_call",
        {},
        {
            "adam.global_clipnorm": 1.0,
            "scaled.rule == rule": True,
            "int(adam.iterations) + scaled.skipped_steps": 60,
            "model.layers[0].compute_dtype": "float32",
        },
    ),
    (
        "fine_tuning",
        {},
        {
            "{v.dtype for v in source.weights}": {"float32"},
            "{v.dtype for v in model.weights}": {"float16"},
            "{v.dtype for v in served.weights}": {"float16"},
            "str(getattr(data['x'], 'dtype', None) or "
            "data['x'].element_spec[0].dtype.name)": "float16",
            "{row.aligned for row in tfmix.hardware.advise(model, 192).rows}": {
                True
            },
        },
    ),
]
SHORT_TENSORFLOW = [
    ("training_loop", {}, {"int(lost)": 0, "accuracy > 0.4": True}),
    (
        "gan",
        {},
        {
            "{layer.compute_dtype for layer in gan.generator.layers}": {
                "float16"
            },
            "int(gan.g_optimizer.iterations)": 29,
        },
    ),
    (
        "diffusion",
        {},
        {
            "model.optimizer.skipped_steps": 0,
            "model.network.compute_dtype": "float16",
        },
    ),
]
if BACKEND == "tensorflow":
    SHORT += SHORT_TENSORFLOW


def namespace(name, **constants):
    """Runs a script in this process; returns its names."""
    path = compared.EXAMPLES / f"{name}.py"
    source = compared.with_constants(path.read_text("utf-8"), constants)
    names = {}
    exec(compile(source, str(path), "exec"), names)
    return names


# The other scripts train for two seconds or more.
QUICK = {"three_lines", "levels O3"}


def short_runs():
    for name, constants, expected in SHORT:
        case = " ".join([name, *constants.values()])
        marks = () if case in QUICK else pytest.mark.slow
        yield pytest.param(name, constants, expected, id=case, marks=marks)


@pytest.mark.parametrize(("name", "constants", "expected"), list(short_runs()))
def test_one_epoch_leaves(name, constants, expected):
    names = namespace(name, EPOCHS=1, **constants)
    assert {how: eval(how, names) for how in expected} == expected


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


@pytest.mark.parametrize(
    ("own", "expected"),
    [((91.0, 97.0, 94.0), (2.0, 6.0)), ((92.0, 92.0, 92.0), (0.0, 4.0))],
)
def test_the_gap_is_that_of_the_means_and_the_noise_the_larger_range(
    own, expected
):
    assert compared.gap(own, (90.0, 92.0, 94.0)) == pytest.approx(expected)


def test_a_failing_process_is_reported_with_its_output(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.executable", "/bin/false")
    three_lines = compared.COMPARISONS["three_lines"]
    with pytest.raises(RuntimeError, match="three_lines.py.* ended without"):
        compared.run(three_lines, {}, str(tmp_path))


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
