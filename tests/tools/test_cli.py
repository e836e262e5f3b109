"""The command line: what it prints, its JSON, its exit codes, no traceback."""

import importlib
import importlib.metadata
import importlib.util
import json
import re
import sys

import keras
import numpy as np
import pytest

import tfmix
from tests import helpers, processes
from tests.tools.hardware import programs
from tfmix.tools import cli, commands
from tfmix.tools.hardware import compilers

COMMANDS = "advise check compile convert demo devices doctor run".split()
ROWS = 12
LOSS = "sparse_categorical_crossentropy"


@keras.saving.register_keras_serializable("test_cli")
class Own(keras.Model):
    """A model of the user's own has no inputs to compare with."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.head = keras.layers.Dense(3)

    def call(self, x):
        return self.head(x)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with models, batches and files that are neither."""
    path = tmp_path_factory.mktemp("cli")
    random = np.random.default_rng(0)
    x = random.normal(size=(2 * ROWS, 8)).astype("float32")
    y = random.integers(0, 3, 2 * ROWS)
    np.savez(path / "batch.npz", x=x, y=y)
    np.savez(path / "named.npz", features=x)
    np.savez(path / "targets.npz", y=y)
    np.savez(path / "narrow.npz", x=x[:, :3], y=y)
    np.save(path / "inputs.npy", x)
    with tfmix.policy_scope("mixed_float16"):
        inputs = keras.Input((8,), name="features")
        hidden = keras.layers.Dense(16, name="first", activation="relu")
        logits = keras.layers.Dense(3, name="last")(hidden(inputs))
        model = keras.Model(inputs, tfmix.float32_output("softmax")(logits))
        model.compile("adam", loss="sparse_categorical_crossentropy")
        model.fit(x, y, verbose=0)
    model.save(path / "good.keras")
    keras.Model(inputs, model.output).save(path / "plain.keras")
    bias = np.zeros(16, "float32")
    bias[3] = 1e5
    hidden.bias.assign(bias)
    model.save(path / "bad.keras")
    layers = [keras.Input((None, 3)), keras.layers.Dense(2)]
    keras.Sequential(layers).save(path / "long.keras")
    own = Own()
    own(x)
    own.save(path / "own.keras")
    (path / "text.npz").write_text("no arrays")
    return path


@pytest.fixture
def run(capsys, folder, monkeypatch):
    """Returns a function that runs a line of words beside the files."""
    monkeypatch.chdir(folder)

    def run(line):
        code = cli.main(line.split())
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def data(run):
    """Returns a function that runs a line, and reads the JSON it prints."""

    def data(line, expected=cli.OK):
        code, out, _ = run(f"{line} --json")
        assert code == expected
        return json.loads(out)

    return data


def test_devices_prints_a_table_and_why_auto_is_what_it_is(run, data):
    code, out, err = run("devices")
    assert (code, err) == (cli.OK, "")
    assert "CPU" in out
    assert "'auto' is '" in out
    found = data("devices")
    assert found["auto"] in ("float32", "mixed_float16", "mixed_bfloat16")
    assert {"kind", "name", "float16"} <= set(found["devices"][0])


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_examples_and_exit_codes(capsys, name):
    with pytest.raises(SystemExit) as stopped:
        cli.main([name, "--help"])
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    assert f"tfmix {name}" in out.split("examples:")[1]
    assert "exit codes:" in out
    assert "--json " in out
    if "--policy" in out:
        assert "mixed_float8" in out
        assert "O3" in out


def test_every_command_is_listed_in_the_help(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    out = capsys.readouterr().out
    assert all(f"\n    {name} " in out for name in COMMANDS)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("chek m.keras", "choose from"),
        ("nothing", "usage: tfmix"),
        ("devices --nothing", "usage: tfmix"),
        ("demo --epochs many", "usage: tfmix"),
        ("check m.keras --data b.npz --policy int8", "choose from"),
        ("convert m.keras n.keras --policy fp16", "mixed_float16"),
    ],
)
def test_wrong_words_exit_with_2_and_say_what_is_right(capsys, line, message):
    with pytest.raises(SystemExit) as stopped:
        cli.main(line.split())
    assert stopped.value.code == cli.BAD_INPUT
    assert message in capsys.readouterr().err


CHECK = "check good.keras --data batch.npz"
COMPILE = "compile good.keras --batch 32"
# The packages without which a command cannot begin.
NEEDED = {"demo": "sklearn"}
# Wrong words of commands, and the messages.
WRONG_INPUT = {
    "check none.keras --data batch.npz": "Cannot load 'none.keras': Value",
    "check good.keras --data none.npz": "numpy.savez",
    "check good.keras --data text.npz": "Cannot load 'text.npz'",
    "check good.keras --data targets.npz": "holds no inputs",
    "check good.keras --data narrow.npz": (
        r"expected shape=\(None, 8\), found shape=\(24, 3\)"
    ),
    "check own.keras --data narrow.npz": "could not be checked on.*shape",
    f"{CHECK} --loss none": "none",
    "advise none.keras --batch-size 8": "Cannot load 'none.keras'",
    "advise good.keras --batch-size 0": "batch_size=0",
    "advise long.keras --batch-size 8": (
        r"\(None, None, 3\).*in a shell `--input-shape 128 3`"
    ),
    "advise long.keras --batch-size 8 --input-shape 5": (
        r"input_shape=\(5,\).*in a shell `--input-shape 128 3`"
    ),
    f"{COMPILE} --target v5e": "take.*mixed_bfloat16",
    "convert none.keras new.keras --policy O2": "Cannot load 'none.keras'",
    "convert good.keras good.keras --policy O2": "--overwrite",
    "convert good.keras none/new.keras --policy O2": "No such file.*new.keras",
    "demo --epochs 0": "`epochs` must be a whole number.*epochs=0",
    "demo --seeds -3": "`seeds` must be a whole number.*seeds=-3",
}


@pytest.mark.parametrize("line", WRONG_INPUT)
def test_a_command_says_what_is_wrong_and_writes_nothing(run, folder, line):
    command = line.split()[0]
    if command in NEEDED:
        pytest.importorskip(NEEDED[command])

    def written():
        return {path: path.stat().st_mtime_ns for path in folder.iterdir()}

    before = written()
    code, out, err = run(line)
    assert (code, out) == (cli.BAD_INPUT, "")
    assert re.search(WRONG_INPUT[line], err, re.IGNORECASE | re.DOTALL)
    assert err.startswith(f"tfmix {command}: error: ")
    # No message shows the values of arrays.
    assert len(err) < 1000
    assert written() == before


def test_a_pipe_is_as_wide_as_the_environment_says(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    _, out, _ = run(CHECK)
    assert max(map(len, out.splitlines())) <= 60


def test_the_demo_without_its_data_says_what_to_install(run, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    code, _, err = run("demo")
    assert code == cli.BAD_INPUT
    assert "pip install scikit-learn" in err


def test_check_finds_a_healthy_model_healthy(run):
    code, out, _ = run(CHECK)
    assert code == cli.OK
    assert "mixed_float16 against float32: healthy" in out
    assert "headroom: how often a value can double" in out


def test_check_names_the_layer_and_suggests_a_policy(run, data):
    bad = CHECK.replace("good", "bad")
    code, out, _ = run(bad)
    assert code == cli.UNHEALTHY
    assert 'Dense(..., name="first", dtype="float32")' in out.splitlines()
    line = f"{bad} --suggest --policy mixed_float16"
    found = data(line, cli.UNHEALTHY)
    assert found["healthy"] is False
    worst = found["rows"][0]
    assert (worst["layer"], worst["verdict"]) == ("first", "overflow")
    assert "'first'" in found["notes"][0]
    # The note has what the policy adds to its default layers.
    assert "softmax" not in found["notes"][0].lower()


@pytest.mark.parametrize(
    ("line", "phases"),
    [
        ("good.keras --data inputs.npy", {"forward"}),
        ("plain.keras --data batch.npz", {"forward"}),
        (
            f"plain.keras --data batch.npz --loss {LOSS}",
            {"forward", "backward"},
        ),
    ],
)
def test_check_without_targets_or_loss_looks_at_the_forward_pass(
    data, line, phases
):
    found = data(f"check {line}")
    seen = {row["phase"] for row in found["rows"]}
    assert seen & {"forward", "backward"} == phases
    if line.startswith("plain"):
        notes = "".join(found["notes"])
        assert ("only the forward pass" in notes) is (LOSS not in line)


def test_advise_prints_shapes_padding_and_bytes(run, data):
    code, out, err = run("advise good.keras --batch-size 32")
    assert (code, err) == (cli.OK, "")
    last = next(line for line in out.splitlines() if "last" in line)
    assert "(32, 16, 3)" in last
    assert "n 3 -> 8" in last
    assert "mixed_bfloat16" in out
    found = data("advise good.keras --batch-size 32")
    assert {row["layer"] for row in found["rows"]} == {"first", "last"}
    weights = 4 * (8 * 16 + 16 + 16 * 3 + 3)
    memory = found["memory"]["mixed_float16"]
    assert memory["weights"] == weights
    # Adam's two moments, and its learning rate.
    assert 2 * weights <= memory["slots"] <= 2 * weights + 32


def test_advise_on_a_float32_model_says_how_to_convert_it(run):
    _, out, _ = run("advise long.keras --batch-size 8 --input-shape 5 3")
    assert "a model in float32, batch of 8" in out
    assert "`tfmix convert`" in " ".join(out.split())


def test_compile_says_how_much_it_has_to_install(run, capsys, monkeypatch):
    with pytest.raises(SystemExit):
        cli.main(["compile", "--help"])
    assert "an extra of 3 GB" in " ".join(capsys.readouterr().out.split())
    monkeypatch.setattr(compilers, "missing", lambda target: ["nvidia.cudnn"])
    code, _, err = run(COMPILE)
    assert code == cli.BAD_INPUT
    assert "`pip install '.[nvidia]'` in tfmix's folder (3 GB); no GPU" in err


@programs.needs("h200")
def test_compile_says_what_an_h200_would_run(data):
    found = data(f"{COMPILE} --target h200")
    assert (found["policy"], found["target"]) == ("mixed_float16", "h200")
    assert {row["dtype"] for row in found["rows"]} == {"float16"}
    assert found["memory"]["fits"]


@pytest.mark.costly
@pytest.mark.parametrize("option", ["", "--inference"])
def test_convert_writes_a_model_that_predicts_nearly_the_same(
    data, tmp_path, option
):
    source = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
    source.compile("sgd", loss="mse")
    x = np.load("inputs.npy")
    source.fit(x, x[:, :3], verbose=0)
    source.save(tmp_path / "source.keras")
    target = f"{tmp_path}/target.keras"
    found = data(
        f"convert {tmp_path}/source.keras {target} --policy O2 {option}"
    )
    assert found["target"] == target
    model = keras.saving.load_model(target)
    assert model.compiled is (not option)
    helpers.assert_close(
        model.predict(x, verbose=0), source.predict(x, verbose=0), "float16"
    )


def test_convert_prints_what_became_of_each_layer(run, data, tmp_path):
    target = tmp_path / "new.keras"
    line = f"convert good.keras {target} --policy mixed_bfloat16"
    code, out, _ = run(line)
    assert code == cli.OK
    assert "first" in out
    assert f"written: {target}" in out
    assert target.is_file()
    found = data(f"convert good.keras {tmp_path}/auto.keras --policy auto")
    assert found["notes"][0].startswith("'auto' is '")


def raises(error):
    def broken():
        raise error

    return broken


def test_an_interrupted_command_ends_as_a_shell_expects(run, monkeypatch):
    monkeypatch.setattr(commands, "devices", raises(KeyboardInterrupt))
    assert run("devices") == (130, "", "tfmix devices: interrupted\n")


def test_an_error_in_tfmix_is_raised_as_it_is(run, monkeypatch):
    monkeypatch.setattr(commands, "devices", raises(ZeroDivisionError))
    with pytest.raises(ZeroDivisionError):
        run("devices")


BEFORE_KERAS = """
import sys
sys.modules["keras"] = None
import {script} as script
sys.exit(script.main())
"""


def before_keras(script, *words):
    """Runs the script's function where Keras cannot be imported."""
    return processes.python("-c", BEFORE_KERAS.format(script=script), *words)


def the_script():
    """Returns what the console script calls, as it was installed."""
    (script,) = importlib.metadata.entry_points(
        group="console_scripts", name="tfmix"
    )
    assert script.attr == "main"
    return script.module


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--help"], cli.OK, "usage: tfmix"),
        ([], cli.OK, "usage: tfmix"),
        (["check", "--help"], cli.OK, "usage: tfmix check"),
        (["--version"], cli.OK, f"tfmix {tfmix.__version__}"),
        (["chekc"], cli.BAD_INPUT, "'chekc'"),
        (["devices"], cli.BAD_INPUT, "keras"),
    ],
)
def test_the_script_reads_its_words_before_keras(words, code, message):
    done = before_keras(the_script(), *words)
    assert done.returncode == code, done.stderr
    assert message in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_the_script_runs_a_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tfmix", "devices", "--json"])
    assert importlib.import_module(the_script()).main() == cli.OK
    assert "auto" in json.loads(capsys.readouterr().out)
