"""Figures show the records, and are written to a given path."""

import dataclasses

import keras
import pytest

from tests.tools.diagnostics import faults
from tfmix.tools.diagnostics import check, plotting


@pytest.fixture(scope="module")
def report():
    case = faults.loud_between_others()
    # Each test restores the policy that it finds, which is set by then.
    keras.config.set_dtype_policy("float32")
    return check.check(case.model, case.x, case.y, loss="mse")


def texts(figure):
    every = [text.get_text() for axis in figure.axes for text in axis.texts]
    return [text for text in every if text]


def test_headroom_has_a_bar_for_every_layer_and_names_the_fault(report):
    figure = plotting.headroom(report)
    forward = [row for row in report.rows if row.phase == "forward"]
    assert len(figure.axes[0].patches) == len(forward)
    faults = [row.verdict.replace("_", " ") for row in report.faults]
    assert sorted(texts(figure)) == sorted(faults)


def test_pictures_are_written_and_a_dollar_is_no_formula(tmp_path, report):
    assert report.plot()._repr_png_().startswith(b"\x89PNG")
    rows = [dataclasses.replace(report.rows[0], layer=r"cost$\x$")]
    many = dataclasses.replace(report, rows=tuple(rows))
    many.plot(tmp_path / "headroom.png")
    for file in tmp_path.iterdir():
        assert file.read_bytes().startswith(b"\x89PNG")
