"""The public names are sorted and documented, and the version is unique."""

import configparser
import dataclasses
import importlib.metadata
import inspect
import pkgutil
import re

import pytest

import tfmix
from tests.tree import ROOT

PACKAGES = {"callbacks", "hardware", "optimizers"}


def undocumented(names, text):
    """Returns the names that the text does not mention in code font."""
    return [
        name
        for name in names
        if not re.search(rf"`(?:tfmix\.)?{re.escape(name)}\b", text)
    ]


def test_all_names_everything_public_in_order_and_nothing_else():
    public = {
        name
        for name, value in vars(tfmix).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert tfmix.__all__ == sorted(public | PACKAGES) == dir(tfmix)


@pytest.mark.parametrize("name", tfmix.__all__)
def test_every_public_name_has_its_own_docstring(name):
    documented = getattr(tfmix, name)
    assert vars(documented).get("__doc__") or documented.__doc__
    if inspect.isclass(documented):
        assert "__doc__" in vars(documented), "the docstring is inherited"


def test_every_public_name_is_in_the_readme_or_the_docs():
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    assert not undocumented(tfmix.__all__, text)


API = sorted((ROOT / "docs" / "api").glob("*.md"))
RECORDS = re.findall(
    r"^::: (tfmix\.\w+\.?[\w.]*\.[A-Z]\w+)$",
    "\n".join(page.read_text("utf-8") for page in API),
    re.M,
)


def undescribed(record):
    """Returns the fields of a record that its docstring does not name."""
    fields = getattr(record, "__dataclass_fields__", None)
    names = list(fields or getattr(record, "_fields", ()))
    described = (record.__doc__ or "").partition("Attributes:")[2]
    return [n for n in names if not re.search(rf"^ +{n}: ", described, re.M)]


@pytest.mark.parametrize("path", RECORDS)
def test_a_record_describes_its_attributes(path):
    assert not undescribed(pkgutil.resolve_name(path))


def test_an_undescribed_field_and_an_undocumented_name_are_found():
    @dataclasses.dataclass
    class Record:
        """A record.

        Attributes:
            described: A field with a description.
        """

        described: int
        undescribed: int  # this field has none

    assert undescribed(Record) == ["undescribed"]
    text = "Call `tfmix.guard(model)`, or `check`; guarded, checkers."
    assert undocumented(["check", "guard", "apply"], text) == ["apply"]


def test_the_version_is_written_in_one_place():
    assert re.fullmatch(r"\d+\.\d+\.\d+", tfmix.__version__)
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    assert config["metadata"]["version"] == "attr: tfmix.__version__"
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## {tfmix.__version__}" in changelog
    try:
        installed = importlib.metadata.version("tfmix")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("tfmix is not installed, it is run from the checkout")
    assert installed == tfmix.__version__
