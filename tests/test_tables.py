"""Tables fit any width: numbers stay whole, and long names are shortened."""

import io

import pytest
from rich import console

from tests import helpers
from tfmix import _tables

LONG = "model/encoder/block_11/attention/query_projection"
TABLE = _tables.Table(
    ("layer", "policy", "why"),
    [
        (LONG, "mixed_float16", "computes in float16"),
        ("head", "float32", "the model's output"),
    ],
    "A title",
    ["A note"],
)


def drawn(width, table=TABLE):
    out = io.StringIO()
    console.Console(file=out, width=width, color_system=None).print(table)
    return out.getvalue()


def test_cells_that_fit_are_not_cut_and_wide_html_scrolls():
    class Report(_tables.Printed):
        def tables(self):
            return [TABLE]

    assert LONG in drawn(160)
    assert "computes in float16" in drawn(160)
    page = helpers.notebook_html(Report())
    assert "overflow-x:auto" in page
    assert "A title" in page


@pytest.mark.parametrize("width", [50, 60])
def test_a_long_name_is_wrapped_and_loses_nothing(width):
    text = drawn(width)
    assert max(map(len, text.splitlines())) <= width
    parts = [line.split()[0] for line in text.splitlines()[3:-2]]
    assert "".join(parts).startswith(LONG)
    # Sentences are wrapped between words.
    assert {"computes", "float16"} <= set(text.split())


def test_shapes_and_short_words_are_not_cut_for_a_long_name():
    row = (LONG, "float16", "(7, 13, 131)", "k 131 -> 136, n 2 -> 8", "a " * 40)
    heads = ("layer", "dtype", "(m, k, n)", "pad", "why")
    text = drawn(80, _tables.Table(heads, [row]))
    for cell in ("(m, k, n)", *row[1:4]):
        assert cell in text
    assert max(map(len, text.splitlines())) <= 80
