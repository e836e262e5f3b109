"""The guide lists the state that tfmix keeps on Keras's objects."""

import re

from tests.tree import ROOT

SOURCES = {
    path: path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "tfmix").rglob("*.py"))
}
MARK = re.compile(r'"_tfmix_(\w+)"')
PAGE = ROOT / "CONTRIBUTING.md"


def listed():
    """Returns the marks that the page names."""
    text = PAGE.read_text(encoding="utf-8")
    _, _, after = text.partition("| marks (`_tfmix_…`) | on |\n")
    table, _, _ = after.partition("\n\n")
    return {
        name
        for row in table.splitlines()[1:]
        for name in re.findall(r"`(\w+)`", row.split("|")[1])
    }


def test_there_is_one_context_variable():
    found = [
        path.name
        for path, text in SOURCES.items()
        for _ in re.findall(r"ContextVar\(", text)
    ]
    assert found == ["context_values.py"]


def test_the_page_lists_each_mark():
    marks = {name for text in SOURCES.values() for name in MARK.findall(text)}
    assert marks == listed()
    assert len(marks) <= 9, sorted(marks)
