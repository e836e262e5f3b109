"""Figures show the records, and are written to a given path."""

import dataclasses

import keras
import pytest
from matplotlib import colors

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


def test_the_forty_layers_with_the_least_headroom_are_drawn(report):
    row = report.rows[0]
    rows = [
        dataclasses.replace(row, layer=f"layer_{n}", headroom_bits=50.0 - n)
        for n in range(50)
    ]
    many = dataclasses.replace(report, rows=tuple(rows))
    axis = plotting.headroom(many).axes[0]
    names = [label.get_text() for label in axis.get_yticklabels()]
    assert len(names) == 40
    assert "layer_49" in names
    assert "layer_0" not in names
    assert axis.get_ylabel().startswith("10 more")


def test_float32_layers_are_grey(report):
    narrow = ("forward", "float32", "ok")
    rows = [
        dataclasses.replace(row, dtype="float32", verdict="ok")
        for row in report.rows
    ]
    for each in (report, dataclasses.replace(report, rows=tuple(rows))):
        bars = plotting.headroom(each).axes[0].patches
        colours = [colors.to_hex(bar.get_facecolor()) for bar in bars]
        found = [(row.phase, row.dtype, row.verdict) for row in each.rows]
        assert colours.count(plotting._GREY) == found.count(narrow)


def test_pictures_are_written_and_a_dollar_is_no_formula(tmp_path, report):
    assert report.plot()._repr_png_().startswith(b"\x89PNG")
    rows = [dataclasses.replace(report.rows[0], layer=r"cost$\x$")]
    many = dataclasses.replace(report, rows=tuple(rows))
    many.plot(tmp_path / "headroom.png")
    for file in tmp_path.iterdir():
        assert file.read_bytes().startswith(b"\x89PNG")
