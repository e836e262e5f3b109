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


def test_each_context_variable_has_its_mechanism():
    found = [
        path.name
        for path, text in SOURCES.items()
        for _ in re.findall(r"ContextVar\(", text)
    ]
    assert sorted(found) == [
        # The settings of the code that a call runs.
        "context_values.py",
        # The watch of the `fit` around.
        "skip_report.py",
        # The platform that `compile_for` compiles for.
        "tracing.py",
    ]


def test_each_weak_collection_of_the_core_has_its_reason():
    weak = [
        path.name
        for path, text in SOURCES.items()
        for _ in re.findall(r"= weakref\.Weak|^ +weakref\.Weak", text, re.M)
        if "tools" not in path.parts
    ]
    assert sorted(weak) == [
        # Counts of optimizers that nothing wraps; those that are left alone.
        *["bare_optimizers.py"] * 2,
        # The checkpoints that a wrapper is restored from.
        "files.py",
        # The models that scale their gradients.
        "model_call.py",
        # Who moves a model's place, and the places.
        *["placing.py"] * 2,
    ]


def test_the_page_lists_each_mark():
    marks = {name for text in SOURCES.values() for name in MARK.findall(text)}
    assert marks == listed()
    assert len(marks) <= 9, sorted(marks)
