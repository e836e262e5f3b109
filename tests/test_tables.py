"""Tables on terminals of any width: numbers whole, long names shortened."""

import io

import pytest
from rich import console

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


def test_what_has_room_is_whole():
    assert LONG in drawn(160)
    assert "computes in float16" in drawn(160)


@pytest.mark.parametrize("width", [50, 60])
def test_a_long_name_is_shortened_in_its_middle(width):
    text = drawn(width)
    assert max(map(len, text.splitlines())) <= width
    (line,) = [one for one in text.splitlines() if "mixed_float16" in one]
    name = line.split()[0]
    start, end = name.split("…")
    assert LONG.startswith(start)
    assert LONG.endswith(end)
    assert len(end) > len(start)
    # Sentences go on in the next line, between words.
    assert {"computes", "float16"} <= set(text.split())


def test_shapes_and_short_words_are_whole_beside_a_long_name():
    row = (LONG, "float16", "(7, 13, 131)", "k 131 -> 136, n 2 -> 8", "a " * 40)
    heads = ("layer", "dtype", "(m, k, n)", "pad", "why")
    text = drawn(80, _tables.Table(heads, [row]))
    for cell in ("(m, k, n)", *row[1:4]):
        assert cell in text
    assert max(map(len, text.splitlines())) <= 80


def test_html_scrolls_where_it_does_not_fit():
    class Report(_tables.Printed):
        def tables(self):
            return [TABLE]

    page = Report()._repr_html_()
    assert page.startswith('<div class="tfmix" style="overflow-x: auto">')
    assert "text-align: left" in page
    assert LONG in page


def test_html_shows_the_names_of_a_note_as_code():
    table = _tables.Table(("layer",), [("a",)], notes=["`rows` < `all`", "1`"])
    page = table.html()
    assert "<p><code>rows</code> &lt; <code>all</code></p>" in page
    assert "<p>1`</p>" in page
