"""`environment` lists the current facts for a bug report."""

import json

import keras
import pytest

import tfmix
from tfmix.tools import cli
from tfmix.tools.diagnostics import environment


def test_environment_names_versions_backend_devices_and_policy():
    tfmix.set_global_policy(tfmix.Policy("mixed_float16", float32_layers=["a"]))
    found = environment.environment()
    assert found.facts["keras"] == keras.__version__
    assert found.facts["tfmix"] == tfmix.__version__
    assert found.facts["backend"] == keras.backend.backend()
    assert found.facts["policy"].startswith("Policy('mixed_float16'")
    assert "CPU" in found.facts["devices"].upper()
    for known in (keras.__version__, found.facts["auto"], "mixed_float16"):
        assert known in " ".join(str(found).split())


def test_environment_lists_replaced_names():
    tfmix.set_global_policy("mixed_float16")
    during = environment.environment().facts["replaced"].split(", ")
    tfmix.set_global_policy("float32")
    after = environment.environment().facts["replaced"].split(", ")
    assert {*after} - {""} < {*during}
    assert any("keras" in name for name in during)


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_the_shell_prints_the_environment(capsys, words):
    assert cli.main(["doctor", *words]) == cli.OK
    out = capsys.readouterr().out
    assert keras.__version__ in out
    if words:
        assert json.loads(out)["facts"]["backend"] == keras.backend.backend()
