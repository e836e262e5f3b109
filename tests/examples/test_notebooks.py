"""The notebooks match their scripts, and run cell by cell."""

import ast
import json
import runpy

import pytest

pytest.importorskip("sklearn", reason="the notebooks' data come with it")
pytest.importorskip("django", reason="the notebooks' texts come with it")
pytest.importorskip("matplotlib", reason="the notebooks draw with it")

from tests import helpers
from tests.tree import ROOT

NOTEBOOKS = runpy.run_path(str(ROOT / ".ci" / "notebooks.py"))
SCRIPTS = sorted(NOTEBOOKS["FOLDER"].glob("*.py"))
# Each script has its notebook, and a test below that runs it.
assert len(SCRIPTS) == len(list(NOTEBOOKS["FOLDER"].glob("*.ipynb"))) == 4
PNG = b"\x89PNG"


def shown(value):
    """Returns a notebook's output for the value of a cell's last line."""
    if hasattr(value, "_repr_png_"):
        return value._repr_png_()
    if hasattr(value, "_repr_mimebundle_"):
        return helpers.notebook_html(value)
    return repr(value)


def run_cell(source, names, place):
    """Runs one cell; returns its output, `None` without one."""
    lines = ast.parse(source).body
    last = lines.pop() if isinstance(lines[-1], ast.Expr) else None
    exec(compile(ast.Module(lines, []), place, "exec"), names)
    if last is None:
        return None
    code = compile(ast.Expression(last.value), place, "eval")
    value = eval(code, names)
    return None if value is None else shown(value)


def run(name):
    """Runs a notebook; returns its names and its outputs."""
    notebook = NOTEBOOKS["FOLDER"] / f"{name}.ipynb"
    names, outputs = {}, []
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        # Cells that install packages do not run.
        if cell["cell_type"] == "code" and not source.startswith("%pip"):
            outputs.append(run_cell(source, names, f"{name}, {cell['id']}"))
    return names, [output for output in outputs if output is not None]


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A folder in which a notebook may write files."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_notebook_matches_its_script(script):
    made = json.loads(
        NOTEBOOKS["notebook"](script.read_text("utf-8"), script.stem)
    )
    there = json.loads(script.with_suffix(".ipynb").read_text("utf-8"))
    code = [cell for cell in there["cells"] if cell["cell_type"] == "code"]
    # The first notebook contains outputs, for readers who do not run it.
    outputs = [cell.pop("outputs") for cell in code]
    assert any(outputs) is (script.stem in NOTEBOOKS["RUN"])
    for cell in code:
        cell["outputs"] = []
    assert there == made, "run `make notebooks`"
    text, install, *_ = made["cells"]
    assert text["source"][0].startswith("# ")
    assert install["source"] == ['%pip install -q "../..[plot,examples]"']
    names = [cell["id"] for cell in made["cells"]]
    assert len(set(names)) == len(names)


@pytest.mark.slow
def test_start():
    names, outputs = run("start")
    assert names["accuracy"] > 0.9
    assert names["optimizer"].skipped_steps == 0
    assert names["advice"].share_16bit == 1
    # The outputs are shapes and three reports.
    assert sum("<pre" in output for output in outputs[1:]) == 3


@pytest.mark.slow
def test_hardware_you_do_not_have(capsys):
    _, outputs = run("hardware_you_do_not_have")
    printed = capsys.readouterr().out
    assert "H200" in outputs[0]
    assert "A TPU has no float16 products" in printed
    if "pip install '.[tpu]'" not in printed:
        assert "<pre" in outputs[3]


@pytest.mark.slow
def test_when_it_goes_wrong(capsys):
    names, outputs = run("when_it_goes_wrong")
    # In float16 the model learns nothing, without a warning.
    assert names["in_float16"] < 0.7 < 0.9 < names["in_float32"]
    assert [row.layer for row in names["report"].faults] == ["normalized"]
    assert "healthy: True" in capsys.readouterr().out
    # One step of each epoch is skipped, which does no harm.
    assert names["model"].optimizer.skipped_steps == 15
    assert names["accuracy"] > 0.9
    assert sum(output[:4] == PNG for output in outputs) == 2


@pytest.mark.slow
def test_fine_tune_a_transformer():
    names, outputs = run("fine_tune_a_transformer")
    # One guess in eight would be right.
    assert names["accuracy"] > 0.6
    assert names["trained_weights"] < names["model"].count_params() / 3
    assert sum("<pre" in output for output in outputs) == 2
