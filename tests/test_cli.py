"""The command line: what it prints, its JSON, its exit codes, no traceback."""

import importlib.metadata
import json
import os
import subprocess
import sys

import pytest

from tfmix import cli

COMMANDS = ["demo", "devices"]


def run(capsys, *words):
    """Runs a command in this process; returns code, output and errors."""
    code = cli.main(list(words))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_devices_prints_a_table_and_why_auto_is_what_it_is(capsys):
    code, out, err = run(capsys, "devices")
    assert (code, err) == (cli.OK, "")
    assert "CPU" in out
    assert "'auto' is '" in out


def test_devices_as_json_holds_the_same_records(capsys):
    code, out, _ = run(capsys, "devices", "--json")
    data = json.loads(out)
    assert code == cli.OK
    assert data["auto"] in ("float32", "mixed_float16", "mixed_bfloat16")
    assert {"kind", "name", "float16"} <= set(data["devices"][0])


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_examples_and_exit_codes(capsys, name):
    with pytest.raises(SystemExit) as stopped:
        cli.main([name, "--help"])
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    assert f"tfmix {name}" in out.split("examples:")[1]
    assert "exit codes:" in out
    assert "--json" in out


def test_every_command_is_listed_in_the_help(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    out = capsys.readouterr().out
    assert all(f"\n    {name} " in out for name in COMMANDS)


@pytest.mark.parametrize(
    "words",
    [[], ["nothing"], ["devices", "--nothing"], ["demo", "--epochs", "many"]],
)
def test_wrong_words_exit_with_2_and_show_the_usage(capsys, words):
    with pytest.raises(SystemExit) as stopped:
        cli.main(words)
    assert stopped.value.code == cli.BAD_INPUT
    assert "usage: tfmix" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["epochs", "seeds"])
@pytest.mark.parametrize("value", ["0", "-3"])
def test_a_wrong_value_exits_with_2_and_names_the_option(capsys, option, value):
    code, out, err = run(capsys, "demo", f"--{option}", value)
    assert (code, out) == (cli.BAD_INPUT, "")
    assert f"`{option}` must be a whole number" in err
    assert f"{option}={value}" in err
    assert "Traceback" not in err


def test_the_demo_without_its_data_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tfmix.examples.digits", None)
    code, _, err = run(capsys, "demo")
    assert code == cli.BAD_INPUT
    assert "pip install 'tfmix[examples]'" in err


def test_an_interrupted_command_ends_as_a_shell_expects(capsys, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "devices", interrupted)
    code, _, err = run(capsys, "devices")
    assert code == 130
    assert err == "tfmix devices: interrupted\n"


def test_an_error_of_our_own_is_not_dressed_up_as_bad_input(monkeypatch):
    def broken():
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "devices", broken)
    with pytest.raises(ZeroDivisionError):
        cli.main(["devices"])


def test_python_dash_m_runs_it_and_passes_the_exit_code_on():
    done = subprocess.run(
        [sys.executable, "-m", "tfmix", "demo", "--seeds=0", "--json"],
        env={**os.environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == cli.BAD_INPUT
    assert "`seeds` must be" in done.stderr


def test_the_console_script_is_the_same_function():
    scripts = importlib.metadata.entry_points(group="console_scripts")
    found = [script for script in scripts if script.name == "tfmix"]
    if not found:
        pytest.skip("tfmix is not installed, it is run from the checkout")
    assert found[0].load() is cli.main
