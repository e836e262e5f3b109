"""The examples in the docstrings print what stands there."""

import doctest
import importlib

import pytest

from tests.tree import ROOT

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
FILES = [
    path
    for path in sorted((ROOT / "tfmix").rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]


def name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


@pytest.mark.every_case("each is a file, and fast")
@pytest.mark.parametrize("module", [name(path) for path in FILES])
def test_the_examples_of_a_module_are_true(module):
    found = doctest.testmod(importlib.import_module(module), optionflags=FLAGS)
    assert found.attempted
    assert not found.failed
