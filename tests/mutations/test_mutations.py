"""The faults that `make mutations` puts into tfmix."""

import shutil

import pytest

from tests.mutations import catalogue
from tests.tree import ROOT


@pytest.mark.parametrize("fault", catalogue.faults(), ids=lambda f: f.name)
def test_a_fault_changes_one_place_and_names_tests(fault, tmp_path):
    source = ROOT / fault.folder
    shutil.copytree(source, tmp_path / fault.folder)
    changed = fault.apply(tmp_path)
    original = ROOT / changed.relative_to(tmp_path)
    assert changed.read_text("utf-8") != original.read_text("utf-8")
    assert all((ROOT / file).is_file() for file in fault.tests)


def test_a_missing_text_is_refused(tmp_path):
    (tmp_path / catalogue.faults()[0].folder).mkdir(parents=True)
    with pytest.raises(ValueError, match="occurs 0 times"):
        catalogue.faults()[0].apply(tmp_path)


def test_there_are_at_least_ten_faults_with_unique_names():
    names = [fault.name for fault in catalogue.faults()]
    assert len({*names}) == len(names) >= 10
