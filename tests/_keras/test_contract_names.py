"""Each private name exists as expected, has a contract, and is used."""

import importlib
import inspect
import re

import pytest

from tests._keras import private_names
from tests._keras.contracts import (
    ATTRIBUTES,
    CONSTANTS,
    ELSEWHERE,
    FUNCTIONS,
    OURS,
    PACKAGES,
    check_takes,
    contracts,
    find,
    skip_unless_here,
)

pytestmark = pytest.mark.every_case("each row is a rule of its own, and fast")


@pytest.mark.parametrize(
    ("owner", "attribute", "expected"),
    FUNCTIONS,
    ids=[f"{owner}.{name}" for owner, name, _ in FUNCTIONS],
)
def test_function_is_there_and_takes_these(owner, attribute, expected):
    skip_unless_here(attribute)
    pytest.importorskip(owner.partition(".")[0])
    check_takes(getattr(find(owner), attribute), expected)


def test_another_signature_is_found():
    check_takes(lambda x, mask, new=None, *more, **rest: None, "x mask")
    for other in (
        lambda x: None,
        lambda mask, x: None,
        lambda x, mask, new: None,
    ):
        with pytest.raises(AssertionError):
            check_takes(other, "x mask")


@pytest.mark.parametrize(
    ("owner", "attribute", "kind"),
    CONSTANTS,
    ids=[f"{owner}.{name}" for owner, name, _ in CONSTANTS],
)
def test_constant_is_there_and_of_this_type(owner, attribute, kind):
    skip_unless_here(attribute)
    assert isinstance(getattr(find(owner), attribute), kind)


@pytest.mark.parametrize(
    ("make", "attribute", "kind"),
    [row[1:] for row in ATTRIBUTES],
    ids=[
        f"{row[0]}-{row[2]}-{row[3].__name__}".replace(" ", "_")
        for row in ATTRIBUTES
    ],
)
def test_attribute_is_there_and_of_this_type(make, attribute, kind):
    skip_unless_here(attribute)
    assert isinstance(getattr(make(), attribute), kind)


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


def check_all_are_in_a_contract(folder):
    found = names_of(folder)
    left_out = {n: found[n] for n in sorted(set(found) - contracts())}
    assert not left_out, f"private names without a contract: {left_out}"


# JAX has no public way to XLA's compilers, which only this file uses.
COMPILERS = "hardware/compilers.py"


def files_outside(folder, allowed):
    """Yields the files of a folder that may not use private names."""
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder).as_posix()
        if name.partition("/")[0] != allowed and name != COMPILERS:
            yield name, path


def check_no_private_module(folder, allowed):
    found = {
        name: sorted(mentioned)
        for name, path in files_outside(folder, allowed)
        if (
            mentioned := private_names.mentions(
                path.read_text(encoding="utf-8")
            )
        )
    }
    assert not found, f"private modules outside of {allowed}/: {found}"


def test_each_private_name_is_in_a_contract():
    assert len(names_of(OURS / "_keras")) > 50
    check_all_are_in_a_contract(OURS / "_keras")


def check_each_contract_is_needed(folder):
    found = set(names_of(folder))
    for path in folder.glob("*.py"):
        # Names without an underscore are found as words.
        found |= set(re.findall(r"\w+", path.read_text(encoding="utf-8")))
    rows = {row[1] for row in FUNCTIONS + CONSTANTS}
    rows |= {row[2] for row in ATTRIBUTES}
    rows |= {name for name in ELSEWHERE if name != "_*"}
    assert not rows - found, f"nothing needs these: {sorted(rows - found)}"


def test_each_contract_is_of_a_name_that_is_used():
    check_each_contract_is_needed(OURS / "_keras")


def test_a_contract_that_nothing_needs_is_found(tmp_path):
    for path in (OURS / "_keras").glob("*.py"):
        source = path.read_text(encoding="utf-8")
        source = source.replace("_parent_path", "name")
        (tmp_path / path.name).write_text(source)
    with pytest.raises(AssertionError, match=r"these: \['_parent_path'\]"):
        check_each_contract_is_needed(tmp_path)


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("layer._secret", "_secret"),
        ("layer._secret = 1", "_secret"),
        ("layer._secret()", "_secret"),
        ("vars(layer)['_secret']", "_secret"),
        ("getattr(layer, '_secret', None)", "_secret"),
        ("NAMES = ('_secret',)", "_secret"),
        ("BASE = '_secret'\nlayer[f'{BASE}_cache']", "_secret_cache"),
        ("layer[f'_{name}_cache']", "_*_cache"),
        ("class View(keras.Variable):\n    _x = self._secret", "_secret"),
        (
            "class View(keras.Variable):\n    def _secret(self):\n        pass",
            "_secret",
        ),
        ("import keras.src.secret", "keras.src.secret"),
        ("from keras.src import secret", "keras.src.secret"),
        ("keras.src.secret.call()", "keras.src.secret"),
        ("from tensorflow.python import secret", "tensorflow.python.secret"),
        (
            "from tensorflow.compiler import secret",
            "tensorflow.compiler.secret",
        ),
        ("import_module('keras.src.secret')", "keras.src.secret"),
        (
            "def get():\n"
            "    m = importlib.import_module('keras.src.backend')\n"
            "    return m.secret",
            "keras.src.backend.secret",
        ),
        (
            "def get(name):\n"
            "    return importlib.import_module(f'keras.src.{name}')\n"
            "get('ops').secret",
            "keras.src.ops.secret",
        ),
        (
            "def get():\n"
            "    return importlib.import_module('keras.src.ops')\n"
            "place = get(), 'secret'",
            "keras.src.ops.secret",
        ),
    ],
)
def test_an_injected_name_is_found(tmp_path, code, name):
    path = tmp_path / "ours.py"
    path.write_text(f"{code}\n")
    with pytest.raises(AssertionError, match=re.escape(repr(name))):
        check_all_are_in_a_contract(tmp_path)


def test_our_own_names_are_not_private_names(tmp_path):
    (tmp_path / "ours.py").write_text(
        '"""About `keras.src.secret`.\n\n_secret\n"""\n'
        "from tfmix import _formats\n"
        "class Ours:\n"
        "    def _method(self):\n"
        "        # keras.src.secret and _secret\n"
        "        return self._mine, _formats._SIZES, self.__class__\n"
        "getattr(model, '_tfmix_methods')\n"
        "model._tfmix_methods = None\n"
        "name.startswith('_')\n"
    )
    assert names_of(tmp_path) == {}


def test_only_the_private_side_names_private_modules():
    assert len(list(OURS.rglob("*.py"))) > 50
    check_no_private_module(OURS, "_keras")


@pytest.mark.parametrize(
    "code",
    [
        "import keras.src",
        "def late():\n    from keras.src.backend import common",
        "import tensorflow.python.eager.context as context",
        "from tensorflow.compiler import xla",
        "from jax._src import core",
        "from jaxlib import xla_client",
        "keras.src.ops",
        "importlib.import_module('keras.src.ops')",
        "importlib.import_module(f'keras.src.{name}')",
    ],
)
def test_a_private_module_elsewhere_is_found(tmp_path, code):
    for name in ("_keras", "policy"):
        (tmp_path / name).mkdir()
    (tmp_path / "_keras" / "allowed.py").write_text(f"{code}\n")
    prose = '"""Of `keras.src`."""\n# tensorflow.python\n'
    (tmp_path / "policy" / "scope.py").write_text(prose)
    check_no_private_module(tmp_path, "_keras")
    (tmp_path / "policy" / "scope.py").write_text(f"{prose}{code}\n")
    with pytest.raises(AssertionError, match=r"policy/scope\.py"):
        check_no_private_module(tmp_path, "_keras")


# These underscore names are documented; the keys are their owners.
NOT_PRIVATE = {
    "_fields": "a named tuple's",
    "_replace": "a named tuple's",
    "_getframe": "Python's",
    "_*": "part of a name that tfmix gives",
    "_float32_slots": "the same",
    "_loss_scale_*": "the same",
    "_no_decay": "the same",
}


def names_outside(folder, allowed):
    """Maps files to private names that are neither their own nor known."""
    found = {}
    for file, path in files_outside(folder, allowed):
        source = path.read_text(encoding="utf-8")
        names = private_names.private_names(source)
        names -= private_names.defined(source) | set(NOT_PRIVATE)
        if names:
            found[file] = sorted(names)
    return found


def test_only_the_private_side_names_private_names():
    assert not names_outside(OURS, "_keras")


@pytest.mark.parametrize(
    "code",
    [
        "layer._secret",
        "getattr(layer, '_secret', None)",
        "vars(layer)['_secret']",
        "layer._secret = 1",
    ],
)
def test_a_private_name_elsewhere_is_found(tmp_path, code):
    for name in ("_keras", "policy"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "ours.py").write_text(f"{code}\n")
    found = names_outside(tmp_path, "_keras")
    assert found == {"policy/ours.py": ["_secret"]}


def test_a_name_of_ours_is_not_looked_for(tmp_path):
    (tmp_path / "ours.py").write_text(
        "class Ours:\n"
        "    def __init__(self):\n"
        "        self._mine = 1\n"
        "    def _method(self, other):\n"
        "        return other._mine, other._method()\n"
        "_CONSTANT = '_mine'\n"
    )
    assert names_outside(tmp_path, "_keras") == {}


def test_underscore_names_that_are_public_still_exist():
    found = set()
    for path in OURS.rglob("*.py"):
        found |= private_names.private_names(path.read_text("utf-8"))
    assert not set(NOT_PRIVATE) - found
