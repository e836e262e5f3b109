"""Each private name exists as expected, has a contract, and is used."""

import importlib
import inspect
import re

import pytest

from tests._keras import private_names
from tests._keras.contracts import (
    ATTRIBUTES,
    ELSEWHERE,
    OURS,
    PACKAGES,
    attributes,
    contracts,
    find,
    is_here,
    owned,
    skip_unless_here,
)

pytestmark = pytest.mark.every_case("each row is a rule of its own, and fast")


@pytest.mark.parametrize(("owner", "name"), owned())
def test_name_is_there(owner, name):
    skip_unless_here(name)
    pytest.importorskip(owner.partition(".")[0])
    assert hasattr(find(owner), name)


@pytest.mark.parametrize(
    ("make", "names"),
    ATTRIBUTES.items(),
    ids=[make.__name__ for make in ATTRIBUTES],
)
def test_attributes_are_there(make, names):
    names = [name for name in names.split() if is_here(name)]
    if names:
        made = make()
        assert not [name for name in names if not hasattr(made, name)]


@pytest.mark.parametrize("package", PACKAGES)
def test_package_is_there(package):
    assert inspect.ismodule(importlib.import_module(package))


def names_of(folder):
    """Maps the private names in a folder's files to these files."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        for name in private_names.private_names(source):
            found.setdefault(name, []).append(path.name)
    return found


def check_contracts(folder):
    """Fails for a name without a contract, and one that nothing needs."""
    found = names_of(folder)
    left_out = {n: found[n] for n in sorted(set(found) - contracts())}
    assert not left_out, f"private names without a contract: {left_out}"
    # Names without an underscore are found as words.
    text = "".join(path.read_text("utf-8") for path in folder.glob("*.py"))
    known = {name for _, name in owned()}
    known |= ELSEWHERE - {"_*"} | attributes()
    needless = known - set(found) - set(re.findall(r"\w+", text))
    assert not needless, f"nothing needs these: {sorted(needless)}"


# These underscore names are documented; the keys are their owners.
NOT_PRIVATE = {
    "_fields": "a named tuple's",
    "_replace": "a named tuple's",
    "_getframe": "Python's",
    "_exit": "Python's",
    "_*": "part of a name that tfmix gives",
    "_loss_scale_*": "the same",
}


def names_outside(folder):
    """Maps files outside `_keras/` to private names that are not their own."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        file = path.relative_to(folder).as_posix()
        source = path.read_text(encoding="utf-8")
        names = private_names.private_names(source)
        names -= private_names.defined(source) | set(NOT_PRIVATE)
        if names and not file.startswith("_keras/"):
            found[file] = sorted(names)
    return found


def test_the_private_side_has_a_contract_for_each_name_and_no_other():
    assert len(names_of(OURS / "_keras")) > 50
    check_contracts(OURS / "_keras")


def test_no_other_file_names_something_private():
    assert len(list(OURS.rglob("*.py"))) > 50
    assert not names_outside(OURS)


def test_underscore_names_that_are_public_still_exist():
    assert not set(NOT_PRIVATE) - set(names_of(OURS))


def test_a_contract_that_nothing_needs_is_found(tmp_path):
    for path in (OURS / "_keras").glob("*.py"):
        source = path.read_text(encoding="utf-8")
        source = source.replace("_parent_path", "name")
        (tmp_path / path.name).write_text(source)
    with pytest.raises(AssertionError, match=r"these: \['_parent_path'\]"):
        check_contracts(tmp_path)


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("layer._secret", "_secret"),
        ("vars(layer)['_secret']", "_secret"),
        ("getattr(layer, '_secret', None)", "_secret"),
        ("BASE = '_secret'\nlayer[f'{BASE}_cache']", "_secret_cache"),
        ("class V(keras.Variable):\n    x = self._secret", "_secret"),
        ("def late():\n    from keras.src import secret", "keras.src.secret"),
        ("keras.src.secret.call()", "keras.src.secret"),
        ("import tensorflow.python.eager as x", "tensorflow.python.eager"),
        ("from jaxlib import secret", "jaxlib.secret"),
        ("import_module(f'keras.src.{name}')", "keras.src.*"),
        (
            "m = importlib.import_module('keras.src.ops')\nm.secret",
            "keras.src.ops.secret",
        ),
        ("from keras.src import ops\np = ops, 'x'", "keras.src.ops.x"),
    ],
)
def test_an_injected_name_is_found(tmp_path, code, name):
    for folder in ("_keras", "policy"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "ours.py").write_text(f"{code}\n")
    with pytest.raises(AssertionError, match=re.escape(repr(name))):
        check_contracts(tmp_path / "_keras")
    assert name in names_outside(tmp_path)["policy/ours.py"]
