"""The installed package matches the repository, and runs."""

import ast
import configparser
import re
import sys
import zipfile

import pytest

from tests import processes
from tests.tree import ROOT


@pytest.fixture(scope="module")
def options():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    return config


def folders():
    paths = (ROOT / "tfmix").rglob("*.py")
    return {".".join(path.parent.relative_to(ROOT).parts) for path in paths}


def test_every_folder_with_code_is_a_listed_package(options):
    listed = options["options"]["packages"].split()
    assert listed == sorted(listed)
    assert set(listed) == folders()


def test_the_install_page_names_every_extra(options):
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    extras = options["options.extras_require"]
    assert "plot" in extras
    assert not [name for name in extras if f"'.[{name}]'" not in page]


def requirements(*words):
    """Returns the requirements that the Makefile installs with pip."""
    done = processes.python(".ci/requirements.py", *words, check=True)
    return done.stdout.split()


def test_the_environment_has_the_extras_of_setup_cfg(options):
    lines = requirements("tensorflow-cpu", "docs", "real-data")
    assert any(line.startswith("tensorflow-cpu>=") for line in lines)
    assert not any(line.startswith("tensorflow>") for line in lines)
    wanted = options["options"]["install_requires"].split()
    for name, extra in options["options.extras_require"].items():
        # These take gigabytes, and only `make targets` needs them.
        if name not in ("tpu", "nvidia"):
            wanted += extra.split()
    assert "libtpu" not in lines
    # No test needs these, which take a quarter of the installation.
    assert not {"aeon", "mkdocs<2"} & set(requirements("tensorflow-cpu"))
    rest = [line for line in wanted if not line.startswith("tensorflow")]
    assert set(rest) <= set(lines)


def test_the_demo_only_installs_the_library_and_its_data(options):
    lines = requirements("tensorflow[and-cuda]", "demo")
    wanted = options["options"]["install_requires"].split()
    data = "scikit-learn"
    assert data in options["options.extras_require"]["examples"].split()
    gpu = [re.sub("^tensorflow", "tensorflow[and-cuda]", w) for w in wanted]
    assert sorted(lines) == sorted([*gpu, data])


def test_the_oldest_allowed_versions_are_tested(options):
    lowest = options["options"]["install_requires"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    pinned = "\n".join(re.findall(r"^OLDEST \+?= (.*)$", makefile, re.M))
    tested = dict(re.findall(r"'([^'=]+)==([\d.]+)\.\*'", pinned))
    # The Makefile may test any build of TensorFlow.
    named = [name for name in tested if "$(TENSORFLOW)" in name]
    tested["tensorflow"] = tested.pop(*named)
    assert dict(re.findall(r"^([\w-]+)>=(.+)$", lowest, re.M)) == tested
    assert len(tested) == len(lowest.split())


def test_every_imported_package_is_a_requirement(options):
    tops = set()
    for path in (ROOT / "tfmix").rglob("*.py"):
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.Import):
                tops |= {alias.name.split(".")[0] for alias in node.names}
            if isinstance(node, ast.ImportFrom):
                tops.add(node.module.split(".")[0])
    needed = tops - {"tfmix", *sys.stdlib_module_names}
    named = re.findall(r"^[\w-]+", options["options"]["install_requires"], re.M)
    packages = {"absl": "absl-py"}
    # JAX is an extra, which is only imported under its backend.
    assert {packages.get(top, top) for top in needed - {"jax"}} == set(named)


@pytest.mark.slow
def test_the_wheel_runs_the_demo_away_from_the_checkout(tmp_path):
    words = ["-m", "pip", "wheel", "--no-deps", "--wheel-dir", tmp_path, "."]
    processes.python(*words, check=True)
    (wheel,) = tmp_path.glob("tfmix-*.whl")
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    assert (site / "tfmix" / "py.typed").is_file()
    code = "import tfmix; print(tfmix.__file__)"
    for words in (["-c", code], ["-m", "tfmix", "demo", "--epochs=1"]):
        done = processes.python(*words, cwd=tmp_path, PYTHONPATH=str(site))
        # After one epoch, the demo may miss its goal (exit code 1).
        assert done.returncode in (0, 1), done.stderr
        assert "Traceback" not in done.stderr
        assert str(site) in done.stdout or "mixed_bfloat16" in done.stdout
