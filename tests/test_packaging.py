"""What is installed is what is in the repository, and it runs from there."""

import configparser
import os
import subprocess
import sys
import zipfile

import pytest

from tests.tree import ROOT

INSTALLED_FROM = {"tfmix": ROOT / "tfmix", "tfmix.examples": ROOT / "examples"}


@pytest.fixture(scope="module")
def options():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    return config


def folders():
    found = set()
    for name, folder in INSTALLED_FROM.items():
        for path in folder.rglob("*.py"):
            inside = path.parent.relative_to(folder).parts
            # Opened, not imported.
            if inside == ("notebooks",):
                continue
            found.add(".".join((name, *inside)))
    return found


def test_every_folder_with_code_is_a_listed_package(options):
    listed = options["options"]["packages"].split()
    assert listed == sorted(listed)
    assert set(listed) == folders()


def test_the_install_page_names_every_extra(options):
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    extras = options["options.extras_require"]
    assert "plot" in extras
    assert not [name for name in extras if f"'.[{name}]'" not in page]


def test_the_test_environment_has_what_setup_cfg_asks_for(options):
    done = subprocess.run(
        [
            sys.executable,
            ".ci/requirements.py",
            "tensorflow-cpu",
            "keras==3.12",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.split()
    assert any(line.startswith("tensorflow-cpu>=") for line in lines)
    assert not any(line.startswith("tensorflow>") for line in lines)
    wanted = options["options"]["install_requires"].split()
    for name, extra in options["options.extras_require"].items():
        # Gigabytes, for `make targets` alone.
        if name not in ("tpu", "nvidia"):
            wanted += extra.split()
    assert "libtpu" not in lines
    rest = [line for line in wanted if not line.startswith("tensorflow")]
    assert set(rest) <= set(lines)


@pytest.mark.slow
def test_the_wheel_runs_the_demo_away_from_the_checkout(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "."]
        + ["--wheel-dir", str(tmp_path)],
        cwd=ROOT,
        check=True,
    )
    (wheel,) = tmp_path.glob("tfmix-*.whl")
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    assert (site / "tfmix" / "py.typed").is_file()
    code = "import tfmix; print(tfmix.__file__)"
    for words in (["-c", code], ["-m", "tfmix", "demo", "--epochs=1"]):
        done = subprocess.run(
            [sys.executable, *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(site)},
            capture_output=True,
            text=True,
            check=False,
        )
        # One epoch may miss the demo's goal, which is exit code 1.
        assert done.returncode in (0, 1), done.stderr
        assert "Traceback" not in done.stderr
        assert str(site) in done.stdout or "mixed_bfloat16" in done.stdout
