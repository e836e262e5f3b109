"""The workflows run existing targets, and only pinned actions."""

import configparser
import re

import pytest

from tests.tree import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def read(*names):
    return ROOT.joinpath(*names).read_text(encoding="utf-8")


def loose(text):
    """Returns actions without a pinned commit or a version in a comment."""
    pinned = r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+"
    used = re.findall(r"uses: *(.*)", text)
    return [one for one in used if not re.fullmatch(pinned, one)]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_by_commit(path):
    text = path.read_text(encoding="utf-8")
    assert "uses:" in text
    assert not loose(text)
    # The token is limited to reading.
    assert "\npermissions:\n  contents: read\n" in text


def test_an_unpinned_action_is_found():
    sha = "0b93645e9fea7318ecaed2b359559ac225c90a2b"
    for wrong in ("a/b@v4", f"a/b@{sha}", f"a/b@{sha[:8]} # v5.3.0"):
        assert loose(f"- uses: {wrong}\n") == [wrong]


@pytest.mark.parametrize(
    "page",
    ["README.md", "CONTRIBUTING.md"]
    + [f".github/workflows/{p.name}" for p in WORKFLOWS],
)
def test_the_make_targets_named_exist(page):
    named = re.findall(r"(?:^|`|run: )make ([a-z][a-z-]*)", read(page), re.M)
    makefile = read("Makefile")
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_the_gate_runs_on_each_supported_python():
    config = configparser.ConfigParser()
    config.read_string(read("setup.cfg"))
    classifiers = config["metadata"]["classifiers"]
    promised = re.findall(r":: Python :: (3\.\d+)", classifiers)
    assert promised
    (matrix,) = re.findall(
        r"python: \[(.*)\]", read(".github/workflows/gate.yml")
    )
    assert re.findall(r"[\d.]+", matrix) == promised


def test_the_compilers_are_a_separate_job():
    # Their environment of 4 GB is too large for a gate on every Python.
    assert "targets" not in read(".ci", "run")
    assert "- run: make targets\n" in read(".github/workflows/gate.yml")
