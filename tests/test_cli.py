"""The command line: what it prints, its JSON, its exit codes, no traceback."""

import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys

import keras
import numpy as np
import pytest

import tfmix
from tests import helpers, processes
from tfmix import cli, commands
from tfmix.hardware import compilers
from tfmix.hardware import target as targets

COMMANDS = [
    *("advise", "bench", "check", "compile", "convert", "demo", "devices"),
    *("doctor", "run"),
]
ROWS = 12


def run(capsys, *words):
    """Runs a command in this process; returns code, output and errors."""
    code = cli.main(list(words))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with models, batches and files that are neither."""
    path = tmp_path_factory.mktemp("cli")
    random = np.random.default_rng(0)
    x = random.normal(size=(2 * ROWS, 8)).astype("float32")
    y = random.integers(0, 3, 2 * ROWS)
    np.savez(path / "batch.npz", x=x, y=y)
    np.savez(path / "named.npz", features=x)
    np.savez(path / "other.npz", other=x)
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
    (path / "text.keras").write_text("no model")
    (path / "text.npz").write_text("no arrays")
    return path


def checked(capsys, folder, model, data, *words):
    paths = (str(folder / model), "--data", str(folder / data))
    return run(capsys, "check", *paths, *words)


def test_devices_prints_a_table_and_why_auto_is_what_it_is(capsys):
    code, out, err = run(capsys, "devices")
    assert (code, err) == (cli.OK, "")
    assert "CPU" in out
    assert "'auto' is '" in out
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


def test_every_command_is_listed_in_the_help_but_for_developers(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    out = capsys.readouterr().out
    listed = [name for name in COMMANDS if f"\n    {name} " in out]
    assert listed == [name for name in COMMANDS if name != "bench"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["chek", "m.keras"], "Did you mean 'check'?"),
        (["devics"], "Did you mean 'devices'?"),
        (["nothing"], "usage: tfmix"),
        (["devices", "--nothing"], "usage: tfmix"),
        (["demo", "--epochs", "many"], "usage: tfmix"),
    ],
)
def test_wrong_words_exit_with_2_and_say_what_is_right(capsys, words, message):
    with pytest.raises(SystemExit) as stopped:
        cli.main(words)
    assert stopped.value.code == cli.BAD_INPUT
    assert message in capsys.readouterr().err


CHECK = "check good.keras --data batch.npz"
COMPILE = "compile good.keras --batch 32"
# What a command is given, and what it says of it.
WRONG_INPUT = {
    "check none.keras --data batch.npz": "There is no file .*none.keras",
    "check . --data batch.npz": "is a directory",
    "check text.keras --data batch.npz": "Keras cannot load",
    "check good.keras --data none.npz": "numpy.savez",
    "check good.keras --data text.npz": "NumPy cannot read",
    "check good.keras --data targets.npz": "holds no inputs",
    "check good.keras --data narrow.npz": "shape",
    "check good.keras --data other.npz": r"inputs \['features'\].*'other'",
    f"{CHECK} --rows 0": "at least 1",
    f"{CHECK} --loss none": "none",
    f"{CHECK} --policy int8": "int8",
    f"{CHECK} --policy float32": "float32",
    f"{CHECK} --html none/report.html": "no folder.*'report.html'",
    "advise none.keras --batch-size 8": "There is no file .*none.keras",
    "advise text.keras --batch-size 8": "Keras cannot load",
    "advise good.keras --batch-size 0": "batch_size=0",
    "advise good.keras --batch-size -4": "batch_size=-4",
    "advise long.keras --batch-size 8": r"input_shape=\(128, 3\)",
    "compile none.keras --batch 32": "There is no file .*none.keras",
    f"{COMPILE} --batch 0": "batch_size=0",
    f"{COMPILE} --target h20": "Did you mean 'h200'",
    f"{COMPILE} --target v5e": "take.*mixed_bfloat16",
    f"{COMPILE} --policy float32,int8": "int8",
    f"{COMPILE} --devices 3": "devices=3",
    f"{COMPILE} --html .": "is a folder. Give the name of a file",
    "convert none.keras new.keras --policy O2": "There is no file",
    "convert text.keras new.keras --policy O2": "Keras cannot load",
    "convert good.keras new.h5 --policy O2": r"ends in `\.keras`",
    "convert good.keras good.keras --policy O2": "--overwrite",
    "convert good.keras new.keras --policy int8": "int8",
    "convert good.keras none/new.keras --policy O2": "no folder.*'new.keras'",
    "demo --epochs 0": "`epochs` must be a whole number.*epochs=0",
    "demo --seeds -3": "`seeds` must be a whole number.*seeds=-3",
    "bench nothing faults": r"Received: \['nothing'\]. There are: gpu",
}


@pytest.mark.parametrize("words", WRONG_INPUT)
def test_a_command_says_what_is_wrong_and_writes_nothing(
    capsys, folder, monkeypatch, words
):
    command, *_ = words.split()
    if command == "demo":
        pytest.importorskip("sklearn", reason="the demo trains on its digits")
    if command == "bench":
        pytest.importorskip("benchmarks")
    monkeypatch.chdir(folder)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    code, out, err = run(capsys, *words.split())
    assert (code, out) == (cli.BAD_INPUT, "")
    assert re.search(WRONG_INPUT[words], err, re.IGNORECASE | re.DOTALL)
    assert err.startswith(f"tfmix {command}: error: ")
    after = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert after == before


@pytest.mark.parametrize("command", ["advise", "compile"])
def test_rows_have_one_name_in_all_commands_and_a_short_one(command):
    for option in ("--batch-size", "--batch"):
        words = [command, "m.keras", option, "8"]
        assert cli.build_parser().parse_args(words).batch_size == 8


def test_a_pipe_is_as_wide_as_the_environment_says(capsys, folder, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    words = ("check", str(folder / "good.keras"))
    cli.main([*words, "--data", str(folder / "batch.npz")])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 60


def test_the_demo_without_its_data_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    code, _, err = run(capsys, "demo")
    assert code == cli.BAD_INPUT
    assert "pip install scikit-learn" in err


def test_check_finds_a_healthy_model_healthy(capsys, folder):
    code, out, _ = checked(capsys, folder, "good.keras", "batch.npz")
    assert code == cli.OK
    assert "mixed_float16 against float32: healthy" in out


def test_check_says_how_many_rows_it_took(capsys, folder):
    words = ("good.keras", "batch.npz", "--rows")
    _, some, _ = checked(capsys, folder, *words, "4")
    assert "The first 4 rows of the file were checked" in some
    _, every, _ = checked(capsys, folder, *words, "100")
    assert "rows of the file" not in every


def test_check_names_the_layer_and_the_line_that_mends_it(capsys, folder):
    code, out, _ = checked(capsys, folder, "bad.keras", "batch.npz")
    assert code == cli.UNHEALTHY
    assert 'Dense(..., name="first", dtype="float32")' in out.splitlines()


def test_check_as_json_suggests_a_policy(capsys, folder):
    words = ("--json", "--suggest", "--policy", "mixed_float16")
    code, out, _ = checked(capsys, folder, "bad.keras", "batch.npz", *words)
    data = json.loads(out)
    assert code == cli.UNHEALTHY
    assert data["healthy"] is False
    worst = data["rows"][0]
    assert (worst["layer"], worst["verdict"]) == ("first", "overflow")
    assert "'first'" in data["notes"][0]
    # What it adds, not the layers that are in float32 anyhow.
    assert "softmax" not in data["notes"][0].lower()


@pytest.mark.parametrize("data", ["inputs.npy", "named.npz"])
def test_check_without_targets_looks_at_the_forward_pass(capsys, folder, data):
    code, out, _ = checked(capsys, folder, "good.keras", data, "--json")
    assert code == cli.OK
    phases = {row["phase"] for row in json.loads(out)["rows"]}
    assert "forward" in phases
    assert "backward" not in phases


def test_check_of_a_model_without_a_loss_says_what_was_left_out(capsys, folder):
    _, out, _ = checked(capsys, folder, "plain.keras", "batch.npz", "--json")
    assert "only the forward pass" in json.loads(out)["notes"][0]
    words = ("--loss", "sparse_categorical_crossentropy", "--json")
    _, out, _ = checked(capsys, folder, "plain.keras", "batch.npz", *words)
    data = json.loads(out)
    assert not data["notes"]
    assert "backward" in {row["phase"] for row in data["rows"]}


@pytest.mark.parametrize("kind", [list, dict])
def test_arrays_by_name_take_the_structure_of_the_inputs(kind):
    inputs = {name: keras.Input((2,), name=name) for name in ("b", "a")}
    given = inputs if kind is dict else list(inputs.values())
    model = keras.Model(given, keras.layers.Add()(list(inputs.values())))
    arrays = {"a": 1, "b": 2, "c": 3}
    expected = {"b": 2, "a": 1} if kind is dict else [2, 1]
    assert commands.arranged(arrays, model) == expected


def advised(capsys, path, *words):
    return run(capsys, "advise", str(path), *words)


def test_advise_prints_shapes_padding_and_bytes(capsys, folder):
    words = ("--batch-size", "32")
    code, out, err = advised(capsys, folder / "good.keras", *words)
    assert (code, err) == (cli.OK, "")
    last = next(line for line in out.splitlines() if "last" in line)
    assert "(32, 16, 3)" in last
    assert "n 3 -> 8" in last
    assert "mixed_bfloat16" in out


def test_advise_as_json_counts_the_slots_of_the_saved_optimizer(capsys, folder):
    words = ("--batch-size", "32", "--json")
    code, out, _ = advised(capsys, folder / "good.keras", *words)
    assert code == cli.OK
    data = json.loads(out)
    assert {row["layer"] for row in data["rows"]} == {"first", "last"}
    weights = 4 * (8 * 16 + 16 + 16 * 3 + 3)
    memory = data["memory"]["mixed_float16"]
    assert memory["weights"] == weights
    # Adam's two moments, and its learning rate.
    assert 2 * weights <= memory["slots"] <= 2 * weights + 32


def own_loss(y_true, y_pred):
    return keras.ops.mean(keras.ops.square(y_true - y_pred))


def test_advise_needs_no_loss_of_the_users_own(capsys, tmp_path):
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
    model.compile("sgd", own_loss)
    model.save(tmp_path / "own.keras")
    words = ("--batch-size", "2")
    assert advised(capsys, tmp_path / "own.keras", *words)[0] == cli.OK


def compiled(capsys, path, *words):
    return run(capsys, "compile", str(path), "--batch", "32", *words)


@pytest.mark.skipif(
    bool(compilers.missing(targets.find("h200"))),
    reason="no compiler for an H200: run `make targets`",
)
def test_compile_says_what_an_h200_would_run(capsys, folder, tmp_path):
    page = tmp_path / "step.html"
    words = ("--target", "h200", "--json", "--html", str(page))
    code, out, _ = compiled(capsys, folder / "good.keras", *words)
    assert code == cli.OK
    data = json.loads(out)
    assert (data["policy"], data["target"]) == ("mixed_float16", "h200")
    assert {row["dtype"] for row in data["rows"]} == {"float16"}
    assert data["memory"]["fits"]
    assert "first" in page.read_text(encoding="utf-8")


def test_advise_takes_the_shape_of_a_row(capsys, folder):
    words = ("--batch-size", "8", "--input-shape", "5", "3")
    code, out, _ = advised(capsys, folder / "long.keras", *words)
    assert code == cli.OK
    assert "(40, 3, 2)" in out


def converted(capsys, source, target, *words):
    return run(capsys, "convert", str(source), str(target), *words)


@pytest.mark.costly
@pytest.mark.parametrize("words", [[], ["--inference"]])
def test_convert_writes_a_model_that_predicts_nearly_the_same(
    capsys, folder, tmp_path, words
):
    source = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
    source.compile("sgd", loss="mse")
    x = np.load(folder / "inputs.npy")
    source.fit(x, x[:, :3], verbose=0)
    source.save(tmp_path / "source.keras")
    target = tmp_path / "target.keras"
    words = [*words, "--policy", "O2", "--json"]
    code, out, _ = converted(capsys, tmp_path / "source.keras", target, *words)
    assert code == cli.OK
    assert json.loads(out)["target"] == str(target)
    model = keras.saving.load_model(target)
    assert model.compiled is ("--inference" not in words)
    helpers.assert_close(
        model.predict(x, verbose=0), source.predict(x, verbose=0), "float16"
    )


def test_convert_prints_what_became_of_each_layer(capsys, folder, tmp_path):
    words = ("--policy", "mixed_bfloat16")
    target = tmp_path / "new.keras"
    code, out, _ = converted(capsys, folder / "good.keras", target, *words)
    assert code == cli.OK
    assert "first" in out
    assert f"written: {target}" in out
    assert target.is_file()
    words = ("--policy", "auto", "--json")
    target = tmp_path / "auto.keras"
    _, out, _ = converted(capsys, folder / "good.keras", target, *words)
    assert json.loads(out)["notes"][0].startswith("'auto' is '")


def test_an_interrupted_command_ends_as_a_shell_expects(capsys, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "devices", interrupted)
    code, _, err = run(capsys, "devices")
    assert code == 130
    assert err == "tfmix devices: interrupted\n"


def test_an_error_of_our_own_is_not_dressed_up_as_bad_input(monkeypatch):
    def broken():
        raise ZeroDivisionError

    monkeypatch.setattr(commands, "devices", broken)
    with pytest.raises(ZeroDivisionError):
        cli.main(["devices"])


def test_bench_lists_what_can_be_run(capsys):
    pytest.importorskip("benchmarks")
    code, out, _ = run(capsys, "bench", "--list")
    assert code == cli.OK
    assert {"overhead", "faults", "gpu"} <= set(out.split())
    code, out, _ = run(capsys, "bench", "--list", "--json")
    assert "overhead" in json.loads(out)


def test_bench_away_from_a_checkout_says_where_to_run_it(
    capsys, monkeypatch, tmp_path
):
    elsewhere = tmp_path / "tfmix" / "commands.py"
    monkeypatch.setattr(commands, "__file__", str(elsewhere))
    code, _, err = run(capsys, "bench")
    assert code == cli.BAD_INPUT
    assert "Run `tfmix bench` from a checkout" in err


@pytest.mark.parametrize("returncode", [0, 1])
def test_bench_passes_on_what_became_of_the_runs(
    capsys, monkeypatch, returncode
):
    pytest.importorskip("benchmarks")
    asked = []

    def started(root, words, captured=True):
        asked.append(words)
        out = '["faults"]' if "--list" in words else '[{"name": "faults"}]'
        return subprocess.CompletedProcess([], returncode, out)

    monkeypatch.setattr(commands, "_benchmarks", started)
    code, out, _ = run(capsys, "bench", "faults", "--json")
    assert code == returncode
    assert json.loads(out) == [{"name": "faults"}]
    assert asked[-1] == ["faults", "--json"]
    code, out, _ = run(capsys, "bench", "faults")
    assert code == returncode
    assert "faults" in out


def in_a_shell(folder, *words):
    return processes.python("-m", "tfmix", *words, cwd=folder)


def test_python_dash_m_runs_it_in_a_terminal_and_passes_the_exit_code_on():
    pty = pytest.importorskip("pty", reason="a terminal, which Windows lacks")
    ours, theirs = pty.openpty()
    command = "check", "none.keras", "--data", "none.npz"
    root = str(processes.ROOT)
    env = {**os.environ, "PYTHONPATH": root, "TERM": "xterm"}
    if importlib.util.find_spec("jax") is not None:
        # Keras imports it in half the time.
        env["KERAS_BACKEND"] = "jax"
    done = subprocess.run(
        [sys.executable, "-m", "tfmix", *command],
        env=env,
        stderr=theirs,
        stdout=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == cli.BAD_INPUT
    shown = os.read(ours, 2**16).decode()
    assert "Loading Keras" in shown
    assert "tfmix check: error: There is no file" in shown
    assert "Traceback" not in shown


TO = ("shell.keras", "--policy")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("devices",), cli.OK, ""),
        (("devices", "cpu"), cli.BAD_INPUT, "cpu"),
        (("advise", "good.keras", "--batch-size", "8"), cli.OK, ""),
        (("advise", "text.keras", "--batch-size", "8"), 2, "cannot load"),
        (("advise", "good.keras"), cli.BAD_INPUT, "--batch-size"),
        (CHECK.split(), cli.OK, ""),
        (CHECK.replace("good", "bad").split(), cli.UNHEALTHY, ""),
        (CHECK.replace("good", "text").split(), 2, "Keras cannot load"),
        (("convert", "good.keras", *TO, "O2"), cli.OK, ""),
        (("convert", "good.keras", *TO, "O9"), cli.BAD_INPUT, "O9"),
        (("demo", "--epochs", "1", "--seeds", "1"), None, ""),
        (("demo", "--epochs", "0"), cli.BAD_INPUT, "epochs=0"),
        (("bench", "--list"), cli.OK, ""),
        (("bench", "sparse_memory"), cli.OK, "about 2 min"),
        (("bench", "no-such"), cli.BAD_INPUT, "['no-such']"),
    ],
)
def test_every_command_runs_in_a_shell(folder, words, code, message):
    words = [words[0], "--json", *words[1:]]
    done = in_a_shell(folder, *words)
    if code is None:
        # One seed may or may not reach the demo's goal; the output says it.
        reached = json.loads(done.stdout)["healthy"]
        code = cli.OK if reached else cli.UNHEALTHY
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert bool(done.stdout) is (code != cli.BAD_INPUT)
    if done.stdout:
        assert json.loads(done.stdout)
    (folder / "shell.keras").unlink(missing_ok=True)


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


@pytest.mark.slow
@pytest.mark.parametrize("way", helpers.quick_are({"script"}, ["script", "-m"]))
def test_the_shell_shows_nothing_that_tensorflow_says_of_itself(way):
    call = ["-c", f"import {the_script()}; {the_script()}.main()"]
    words = ["-m", "tfmix"] if way == "-m" else call
    done = processes.python(*words, "devices", check=True)
    assert "'auto' is" in done.stdout
    assert not done.stderr


def test_the_script_runs_a_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tfmix", "devices", "--json"])
    assert importlib.import_module(the_script()).main() == cli.OK
    assert "auto" in json.loads(capsys.readouterr().out)
