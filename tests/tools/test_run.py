"""`tfmix run` runs a script as `python` does, in a policy, and measures it."""

import json
import math
import os
import pathlib
import re
import runpy
import signal
import subprocess
import sys
import tempfile

import keras
import numpy as np
import pytest

from tests import helpers, processes
from tests.tree import ROOT
from tfmix.policy import policy as policies
from tfmix.tools import cli
from tfmix.tools.run import report, session, steps, verdict

BACKEND = keras.backend.backend()
# Without Keras there is no backend to try it with.
once = helpers.requires_backend("tensorflow")
START = "import sys, tfmix_script; sys.exit(tfmix_script.main())"
# Some that train within seconds, with loops, `fit` and steps of their own.
QUICK = {
    "tensorflow": (
        *("custom_train_step", "gan", "guide_loop", "loop_eager"),
        *("loop_with_batch_norm", "unscaled_train_step"),
    ),
    "jax": ("guide_loop_jax", "guide_train_step_jax", "masked_attention"),
}


def python(*words, folder=None, **variables):
    return processes.python(
        *words, cwd=folder, KERAS_BACKEND=BACKEND, **variables
    )


def run(*words, folder=None, **variables):
    """Runs `tfmix run`, as the installed script does."""
    return python("-c", START, "run", *words, folder=folder, **variables)


def measured(folder, source, *options, **variables):
    """Returns the report on a script, and what it printed."""
    script = folder / "script.py"
    script.write_text(source)
    file = folder / "report.json"
    done = run("--report", file, *options, script, folder=folder, **variables)
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text()), done


# A script counts as one that uses Keras if it removes this file.
USES = """
import json, os
os.unlink(json.loads(os.environ["TFMIX_RUN"])["unused"])
"""
SHOWS_ITSELF = """
import os, sys
print(__name__, sys.argv, sys.path[0], sys.orig_argv[1:], __file__)
print(__spec__ and __spec__.name, sorted(set(globals()) & {"cli", "run"}))
print([path for path in sys.path if "startup" in path])
"""
AS_UNDER_PYTHON = {
    "itself": SHOWS_ITSELF,
    "argparse": """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int)
parser.add_argument("--policy")
parser.add_argument("--json")
print(parser.parse_known_args())
""",
    "raises": """
def inner():
    return {}["missing"]
inner()
""",
    "syntax": "if True print",
    "exits with 3": "raise SystemExit(3)",
    "exits with a text": "raise SystemExit('no data')",
    "multiprocessing": """
import multiprocessing, os
def work(number):
    return number + 1, __name__
if __name__ == "__main__":
    for method in ("spawn", "fork"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(pool.map(work, [1, 2]))
""",
    "kills itself": """
import os, signal
os.kill(os.getpid(), signal.SIGTERM)
""",
    "stdin": "print(input())",
}


@once
@pytest.mark.every_case("each is a behaviour, and starts in no time")
@pytest.mark.parametrize("name", AS_UNDER_PYTHON)
def test_a_script_runs_as_under_python(name, tmp_path):
    folder = tmp_path / "a folder"
    folder.mkdir()
    script = folder / "script of mine.py"
    script.write_text(AS_UNDER_PYTHON[name])
    words = script, "--epochs", "3", "--policy", "theirs", "--json", "x"
    expected, done = python(*words), run(*words, TMPDIR=str(tmp_path))
    assert done.stdout == expected.stdout
    # They do not use Keras, which is an error.
    is_exit = name.startswith("exits")
    code = cli.BAD_INPUT if is_exit else expected.returncode or cli.BAD_INPUT
    assert done.returncode == code
    assert done.stderr.startswith(expected.stderr)
    # What it says besides is one line, or nothing if Python was killed.
    assert done.stderr.removeprefix(expected.stderr).count("\n") <= 1


# Packages in place of the real ones, which take seconds. TensorFlow looks for
# Keras and imports it as the real one does; tfmix marks the use of a layer.
PACKAGES = {
    "keras/__init__.py": """
import os
if os.environ.get("KERAS_BACKEND") == "missing":
    raise ImportError("no such backend")
class Layer:
    pass
""",
    "keras/src/__init__.py": "",
    "keras/src/optimizers.py": "",
    "tensorflow/__init__.py": """
import importlib, importlib.util
for _ in range(15):
    importlib.util.find_spec("keras")
importlib.import_module("keras.src.optimizers")
import keras
""",
    "tf_keras/__init__.py": "import tensorflow",
    "tfmix/__init__.py": """
import json, os, pathlib, keras
unused = pathlib.Path(json.loads(os.environ["TFMIX_RUN"])["unused"])
def __init__(self):
    unused.unlink(missing_ok=True)
    print("a layer of tfmix", flush=True)
keras.Layer.__init__ = __init__
""",
    "notebook.py": "import tensorflow as tf\ntf.keras.Layer()",
    "package/__init__.py": "",
    "package/train.py": "import tensorflow as tf\ntf.keras.Layer()",
}
LAUNCH = """
import runpy, sys
launcher = runpy.run_path(sys.argv[1])
sys.exit(launcher["run"](sys.argv[2:], "mixed_float16", file="report.json"))
"""


def launched(folder, *words):
    """Runs a script with those packages; returns what it did, and its report.

    The fake tfmix writes none, so a report holds an error.
    """
    for name, text in PACKAGES.items():
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    launcher = ROOT / "tfmix" / "tools" / "run" / "launcher.py"
    places = {"PYTHONPATH": str(folder), "TMPDIR": str(folder)}
    done = python("-c", LAUNCH, launcher, *words, folder=folder, **places)
    # Whatever happens, no temporary file stays.
    assert not list(folder.glob("tfmix-run-*"))
    file = folder / "report.json"
    return done, json.loads(file.read_text()) if file.exists() else None


WORKERS = """
import multiprocessing
def work(_):
    import tensorflow as tf
    tf.keras.Layer()
if __name__ == "__main__":
    with multiprocessing.get_context("{method}").Pool(1) as pool:
        pool.map(work, [1])
"""
# Ways to come to a layer of Keras.
WAYS = {
    "keras": "import keras\nkeras.Layer()",
    "tensorflow first": """
import tensorflow as tf
import keras
keras.Layer()
""",
    "tf.keras": "import tensorflow as tf\ntf.keras.Layer()",
    "from tensorflow": "from tensorflow import keras\nkeras.Layer()",
    "probes": """
import importlib.metadata, importlib.util, pkgutil, sys
importlib.util.find_spec("keras")
importlib.util.find_spec("keras.src.optimizers")
assert "keras" in [module.name for module in pkgutil.iter_modules()]
importlib.metadata.version("keras")
for finder in sys.meta_path:
    finder.find_spec("keras", None)
import keras
keras.Layer()
""",
    "another backend": """
import os
os.environ["KERAS_BACKEND"] = "missing"
try:
    import keras
except ImportError:
    os.environ["KERAS_BACKEND"] = "tensorflow"
    import keras
keras.Layer()
""",
    "runpy": "import runpy\nrunpy.run_path('notebook.py')",
}


@once
@pytest.mark.parametrize("way", [*WAYS, "-m"])
def test_tfmix_comes_with_keras_however_a_script_comes_to_it(way, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(WAYS.get(way, ""))
    words = ["-m", "package.train"] if way == "-m" else [script]
    done, report = launched(tmp_path, *words)
    assert done.stdout == "a layer of tfmix\n", done.stderr
    assert (done.returncode, done.stderr, report) == (0, "", None)


@once
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_processes_that_a_script_starts_import_tfmix(method, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(WORKERS.replace("{method}", method))
    done, report = launched(tmp_path, script)
    assert done.stdout == "a layer of tfmix\n"
    assert done.returncode == 0
    said = "Keras ran only in processes that the script started"
    assert done.stderr.startswith(f"tfmix run: {said}")
    assert report["error"].startswith(said)


# Each ends without a layer: its source, its code and what is said of it.
NOTHING = {
    "no Keras": ("print(1)", 2, "before it made a layer or an optimizer"),
    "probes": (
        "import importlib.util\nimportlib.util.find_spec('keras')",
        2,
        "Give a script that trains with `keras` or `tf.keras`",
    ),
    "TensorFlow alone": ("import tensorflow", 2, "before it made a layer"),
    "Keras 2": ("import tf_keras", 2, "tf_keras, which is Keras 2"),
    "an error": ("import keras\nraise KeyError(1)", 1, "before it made"),
}


@once
@pytest.mark.parametrize("name", NOTHING)
def test_a_script_without_keras_is_an_error_that_says_what_to_do(
    name, tmp_path
):
    source, code, said = NOTHING[name]
    script = tmp_path / "script.py"
    script.write_text(source)
    done, report = launched(tmp_path, script)
    assert done.returncode == code
    *_, line = done.stderr.splitlines()
    assert line == f"tfmix run: error: {report['error']}"
    assert said in line
    assert (report["script"], report["runs"]) == ("script.py", [])


@once
def test_a_module_runs_as_under_python(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "train.py").write_text(SHOWS_ITSELF)
    words = "-m", "package.train", "--epochs", "3"
    expected = python(*words, folder=tmp_path).stdout
    assert run(*words, folder=tmp_path).stdout == expected
    assert "package.train" in expected


@once
def test_another_sitecustomize_is_imported_too(tmp_path):
    theirs, script = tmp_path / "sitecustomize.py", tmp_path / "script.py"
    theirs.write_text("print('theirs')")
    script.write_text("import sitecustomize; print(sitecustomize.__file__)")
    done = run(script, PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]))
    # The process that starts the script has imported it as well.
    assert done.stdout.splitlines()[-2:] == ["theirs", str(theirs)]


@once
def test_ctrl_c_reaches_the_script(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import time\ntry:\n    print('on', flush=True)\n    time.sleep(60)\n"
        "except KeyboardInterrupt:\n    print('interrupted')\n    raise\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", START, "run", str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # It may be ignored where the tests run.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout.readline() == "on\n"
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=30)
    assert out == "interrupted\n"
    assert process.returncode == -signal.SIGINT
    assert re.search("^KeyboardInterrupt", errors, re.M)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "no script to run. Write `tfmix run train.py`"),
        (("--report", "no/where.json", __file__), "no folder to write"),
        (("--repeat", "0", "x.py"), "at least 1. Received: --repeat 0"),
        (("--repeat", "3", "x.py"), "Add the policy to compare with"),
    ],
)
def test_a_wrong_word_is_one_line_and_code_2(words, said, capsys):
    assert cli.main(["run", *words]) == cli.BAD_INPUT
    captured = capsys.readouterr()
    assert captured.err.startswith("tfmix run: error: ")
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert not captured.out


def test_the_policies_that_it_knows_are_all_there_are():
    assert sorted(cli._POLICIES) == sorted(policies.NAMES)


# What cannot be computed in 16 bit.
MIXES = {
    "tensorflow": "tensorflow.add(x, tensorflow.ones_like(x, 'float32'))",
    "jax": "jax.lax.add(x, jax.numpy.ones_like(x, 'float32'))",
}
TRAINS = """
import importlib, keras, numpy as np
{backend} = importlib.import_module("{backend}")
class Mixes(keras.layers.Layer):
    def call(self, x):
        return {mixes}

def network():
    return keras.Sequential([
        keras.Input((8,)), keras.layers.Dense(4), Mixes(), keras.layers.Dense(1)
    ])

random = np.random.default_rng(0)
x = random.normal(size=(64, 8)).astype("float32")
y = x.sum(1, keepdims=True)
""".replace("{mixes}", MIXES[BACKEND]).replace("{backend}", BACKEND)
FITS = (
    TRAINS
    + """
import time

class Sleeps(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        time.sleep(0.03)

x[5] = np.nan
model = network()
model.compile("sgd", "mse")
model.fit(
    x, y, batch_size=16, epochs=3, verbose=0, shuffle=False,
    callbacks=[Sleeps()],
)
model.train_on_batch(x[32:], y[32:])
"""
)
LOOP = (
    TRAINS
    + """
import tensorflow as tf
model, optimizer = network(), keras.optimizers.Adam()

def step(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
    grads = tape.gradient(loss, model.trainable_variables)
    optimizer.apply(grads, model.trainable_variables)
    return loss

step(x, y)  # eager
for jit in (False, True):
    compiled = tf.function(step, jit_compile=jit)
    for _ in range(5):
        loss = compiled(x, y)
x[5] = np.nan
compiled(x, y)
x[5] = 0.0
print(float(compiled(x, y)))

@tf.function
def epoch():
    for _ in tf.range(7):
        step(x, y)

epoch()
"""
)


@pytest.mark.costly
def test_fit_is_counted_and_explained(tmp_path):
    # The first line of the script is empty.
    own = f'import {BACKEND}, keras; keras.config.set_dtype_policy("float32")'
    data, done = measured(tmp_path, own + FITS, "--policy", "mixed_float16")
    (found,) = data["runs"]
    assert not found["failed"]
    assert found["policy"] == "mixed_float16"
    assert found["why"] == "asked for, in place of the script's float32"
    assert (found["steps"], found["skipped"]) == (13, 3)
    # A step takes the time until the next one, in which `fit` sleeps.
    assert 30 <= found["milliseconds"] < 100
    assert found["first_seconds"] > found["milliseconds"] / 1000
    assert (found["float32_layers"], found["layers"]) == ({"Mixes": 1}, 3)
    (fallen,) = found["fallen"]
    assert "script.py:6" in fallen
    # The report is on stderr, as it prints at the end.
    assert not done.stdout
    printed = done.stderr.partition("tfmix run: script.py. ")[2]
    assert re.search(r"^train steps +13 *$", printed, re.M)


@once
@pytest.mark.costly
def test_a_loop_is_counted_and_explained(tmp_path):
    data, done = measured(tmp_path, LOOP, "--policy", "mixed_float16")
    (found,) = data["runs"]
    assert not found["failed"]
    assert (found["steps"], found["skipped"]) == (20, 1)
    assert found["milliseconds"] > 0
    assert found["loss"] is not None
    assert "script.py:6" in found["fallen"][0]


@pytest.mark.slow
def test_a_script_in_float32_is_asked_no_more(tmp_path):
    source = 'import keras\nkeras.config.set_dtype_policy("float32")\n' + FITS
    source = source.replace("np.nan", "0")
    data, done = measured(tmp_path, source)
    (found,) = data["runs"]
    assert found["policy"] == "float32"
    assert found["why"] == "the script asks for it itself"
    assert (found["steps"], found["skipped"]) == (13, None)


# It begins with its backend, as many scripts do, and sets policies as Keras
# does: at the start, for a moment, and at the end.
ASKS = (
    f"""
import {BACKEND}
import importlib.util
importlib.util.find_spec("keras")
import keras
keras.mixed_precision.set_global_policy("mixed_bfloat16")
old = keras.config.dtype_policy()
keras.config.set_dtype_policy("float32")
keras.config.set_dtype_policy(old)
print(keras.layers.Dense(1).compute_dtype)
"""
    + FITS.replace("np.nan", "0")
    + """
print(type(model.optimizer).__module__)
keras.config.set_dtype_policy("float32")
print(keras.layers.Dense(1).compute_dtype)
"""
)


@pytest.mark.costly
def test_two_runs_stand_side_by_side(tmp_path):
    words = "--policy", "mixed_float16", "--against", "float32"
    data, done = measured(tmp_path, ASKS, *words)
    # The run to compare with comes first, and each has a heading.
    (wide,), (narrow,) = data["others"], data["runs"]
    headings = re.findall(r"^tfmix run: . of 2, .*$", done.stderr, re.M)
    assert headings == [
        "tfmix run: 1 of 2, float32",
        "tfmix run: 2 of 2, mixed_float16",
    ]
    # Keras's own policies are those of tfmix.
    lines = done.stdout.splitlines()
    assert lines[3:] == ["float16", "tfmix.loss_scaling.optimizer", "float32"]
    assert (lines[0], lines[2]) == ("float32", "float32")
    assert "replaces tfmix's policy" not in done.stderr
    # A policy that was asked for replaces the script's own.
    for run, policy in ((narrow, "mixed_float16"), (wide, "float32")):
        assert run["policy"] == policy
        place = "in place of the script's mixed_bfloat16"
        assert run["why"] == f"asked for, {place}"
    assert narrow["steps"] == wide["steps"] == 13
    assert narrow["skipped"] == 0
    # The verdict comes first, and what a CPU can say of it before the ratio.
    printed = done.stderr.partition("tfmix run: script.py. ")[2]
    title = " ".join(printed.partition("mixed_float16")[0].split())
    assert title == data["verdict"]
    # Both began with one seed, although the script sets none.
    assert data["verdict"].startswith("The losses agree: they differ by")
    assert data["verdict"].endswith("does not forecast that on a GPU.")


@pytest.mark.parametrize(
    ("asked", "first", "layers", "first_layers", "refused"),
    [
        ("mixed_float16", "float32", "float32", "float32", "mixed_float16"),
        ("float32", "mixed_float16", "float32", "float32", "mixed_float16"),
        ("float32", "mixed_float16", "float16", "float16", "float32"),
        ("mixed_bfloat16", "mixed_float16", "float32", "float32", "mixed_bf"),
        ("mixed_float16", "float32", "float16", "float32", ""),
        # Their dtypes are equal, as asked.
        ("O1", "mixed_float16", "float16", "float16", ""),
        ("float16", "mixed_float16", "float16", "float16", ""),
    ],
)
def test_equal_layers_are_refused_unless_they_were_asked_for(
    asked, first, layers, first_layers, refused, tmp_path, capsys
):
    before, file = tmp_path / "1.json", tmp_path / "2.json"
    dtype = keras.DTypePolicy(first).compute_dtype
    run = a_run(policy=first, dtype=dtype, layer_dtype=first_layers)
    made = report.Report("train.py", (run,))
    before.write_text(json.dumps(made.to_dict()))
    settings = session.Settings(
        file=str(file), first=str(before), process=os.getpid()
    )
    second = session._Session(asked, settings)
    # A head in another dtype is not most of the layers.
    for number, each in enumerate([layers, layers, "float64"]):
        layer = session._Layer("Dense", each, has_weights=True, fallen="")
        second._found["model", number] = layer
    if not refused:
        second._after_first()
        return
    with pytest.raises(SystemExit) as ended:
        second._after_first()
    assert ended.value.code == 2
    error = json.loads(file.read_text())["error"]
    assert capsys.readouterr().err == f"tfmix run: error: {error}\n"
    assert f"most layers compute in {layers} in both runs" in error
    assert f"`tfmix.apply_policy(model, '{refused}" in error


def test_a_repeated_comparison_takes_turns(tmp_path, monkeypatch, capsys):
    file = pathlib.Path(cli.__file__).with_name("run") / "launcher.py"
    launcher = runpy.run_path(str(file))["run"]
    begun = []

    def wait(words, policy, is_asked, settings):
        begun.append((policy, is_asked, settings))
        pathlib.Path(settings["file"]).write_text('{"runs": []}')
        return 0

    def become(words, policy, is_asked, settings):
        begun.append((policy, is_asked, settings))
        return 0

    monkeypatch.setitem(launcher.__globals__, "_wait", wait)
    monkeypatch.setitem(launcher.__globals__, "_become", become)
    monkeypatch.setattr(tempfile, "mkdtemp", lambda prefix: str(tmp_path))
    assert launcher(["train.py"], None, "float32", repeat=2) == 0
    turns = [(policy, is_asked) for policy, is_asked, _ in begun]
    assert turns == [("float32", True), ("auto", False)] * 2
    then = [settings.get("then") for *_, settings in begun]
    assert then == [("auto", False), None, None, None]
    # Both runs of a pair have a seed, and the second knows of the first.
    assert [settings["seed"] for *_, settings in begun] == [0, 0, 1, 1]
    firsts = [settings.get("first") for *_, settings in begun]
    assert firsts == [None, f"{tmp_path}/1.json", None, None]
    # The last run has the reports of all others, in their order.
    before = [f"{tmp_path}/{number}.json" for number in (1, 2, 3)]
    assert begun[-1][-1]["before"] == before
    assert capsys.readouterr().err.splitlines()[2] == (
        "tfmix run: 3 of 4, float32"
    )


@pytest.mark.parametrize(
    ("source", "code", "said"),
    [
        (
            f"{USES}\nraise SystemExit(4)",
            4,
            "exit code 4, so there are no more and no",
        ),
        (USES, 2, "this run has no report, so there are no more and no"),
        ("print(1)", 2, "before it made a layer or an optimizer of Keras 3"),
    ],
)
def test_a_second_run_that_makes_no_sense_is_not_started(
    source, code, said, tmp_path
):
    script = tmp_path / "script.py"
    script.write_text(f"print('ran')\n{source}")
    done = run("--against", "float32", script, TMPDIR=str(tmp_path))
    assert done.returncode == code
    assert done.stdout.count("ran") == 1
    assert said in done.stderr
    assert list(tmp_path.iterdir()) == [script]


@pytest.mark.slow
def test_a_launcher_may_set_the_policy(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import tfmix\n" + FITS)
    done = python(script, TFMIX_POLICY="mixed_bfloat16")
    assert done.returncode == 0, done.stderr
    assert re.search("^train steps +13 *$", done.stderr, re.M)
    assert "mixed_bfloat16" in done.stderr


def test_a_wrong_policy_of_a_launcher_is_refused(monkeypatch):
    monkeypatch.setenv("TFMIX_POLICY", "fp16")
    with pytest.raises(ValueError, match="'mixed_float16'.*TFMIX_POLICY says"):
        session.begin()


WILD = """
import json, sys
import keras
from tests.wild import _scripts
for script in sys.argv[1:]:
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    print(json.dumps([script, _scripts.train(script, {JIT})]), flush=True)
"""


def check_wild(scripts, folder, jit=False):
    driver, file = folder / "wild.py", folder / "report.json"
    driver.write_text(WILD.replace("{JIT}", str(jit)))
    done = run("--policy", "mixed_float16", "--report", file, driver, *scripts)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line[:1] == "["]
    losses = dict(map(json.loads, lines))
    assert list(losses) == list(scripts)
    assert all(abs(each[-1]) < 1e4 for each in losses.values()), losses
    (found,) = json.loads(file.read_text())["runs"]
    assert not found["failed"]
    # Each trains for several steps, whatever makes them.
    assert found["steps"] >= 4 * len(scripts)
    assert found["skipped"] <= len(scripts)
    assert found["policy"] == "mixed_float16"


@pytest.mark.slow
def test_scripts_of_others_run(tmp_path):
    pytest.importorskip("sklearn", reason="the scripts' data come with it")
    # JAX compiles each operation of a step that is not compiled as a whole.
    check_wild(QUICK[BACKEND], tmp_path, jit=BACKEND == "jax")


def a_run(**values):
    known = {
        **{"policy": "mixed_float16", "dtype": "float16", "why": "asked for"},
        **{"device": "NVIDIA H100", "fast": True, "failed": ""},
        **{"steps": 100, "skipped": 0, "milliseconds": 10.0},
        **{"is_cpu": False, "timed": 99, "blocks": [10.0] * 5},
        **{"first_seconds": 1.0, "peak_bytes": 100 * 2**20, "loss": 0.5},
        **{"float32_layers": {}, "layers": 3, "fallen": ()},
        "layer_dtype": "float16",
    }
    return report.Run(**{**known, **values})


def blocks(*medians):
    return {"blocks": [*medians], "milliseconds": medians[0]}


WIDE = {"policy": "float32", "dtype": "float32", "skipped": None}


def report_of(narrow, wide):
    wide = {**WIDE, **wide}
    return report.Report("train.py", (a_run(**narrow),), (a_run(**wide),))


def test_a_loss_of_nan_is_json_that_can_be_read_again(tmp_path):
    made = report.Report("train.py", (a_run(loss=math.nan),))
    file = tmp_path / "report.json"
    file.write_text(json.dumps(made.to_dict(), allow_nan=False))
    assert math.isnan(session._read(file).loss)


CPU, SLOW, HALF = (
    {"device": "CPU", "fast": False, "is_cpu": True},
    {"fast": False},
    {"peak_bytes": 200 * 2**20},
)
FEW = {"blocks": [], "timed": 12}


@pytest.mark.parametrize(
    ("narrow", "wide", "said"),
    [
        ({}, blocks(18, 17, 19), "Worth it: 1.80 (1.70 to 1.90) times as fast"),
        ({}, blocks(18, 17, 19) | HALF, "float32. It takes 50% of the memory."),
        ({}, blocks(8, 9), "Not worth it: 0.85 (0.80 to 0.90) times as fast"),
        ({}, blocks(8, 9), "float32. The layers may be too small"),
        ({}, blocks(10.2, 9), "can show: 0.96 (0.90 to 1.02) times as fast"),
        ({}, FEW, "show: it takes 50 steps, and 12 were timed after the first"),
        (SLOW, blocks(4), "as this NVIDIA H100 emulates float16. The losses"),
        (CPU, blocks(4), "a GPU. Here: 0.40 (0.40 to 0.40) times as fast as"),
        (CPU, FEW, "The time on a CPU does not forecast that on a GPU."),
        (CPU | {"loss": math.nan}, {}, "Not worth it as it is: the loss in mi"),
        ({"policy": "float32"}, {}, "nothing to compare"),
        ({"loss": 0.51}, {}, "The losses agree: they differ by +0.01."),
        ({"loss": 0.9}, {}, "The losses differ by +0.4; with other seeds they"),
        ({"loss": math.nan}, blocks(18), "the loss in mixed_float16 is nan at"),
        ({}, {"loss": math.inf}, "The loss in float32 is inf at the end."),
    ],
)
def test_the_verdict_is_a_sentence(narrow, wide, said):
    made = report_of(narrow, wide)
    assert said in made.verdict()
    # The order of the two runs does not matter.
    other = report.Report("train.py", made.others, made.runs)
    assert said in other.verdict()


def repeated(ours, theirs):
    runs = tuple(a_run(loss=loss) for loss in ours)
    others = tuple(a_run(**WIDE, loss=loss) for loss in theirs)
    return report.Report("train.py", runs, others).verdict()


def test_losses_of_repeated_runs_are_compared_with_their_spread():
    said = repeated([0.6, 0.4], [0.3, 0.5])
    assert said.endswith(
        "agree: they differ by +0.1, those of one policy by 0.2."
    )
    said = repeated([0.6, 0.62], [0.4, 0.42])
    assert said.endswith("than those of one policy with other seeds, 0.02.")


def test_repetitions_with_one_seed_say_nothing_of_others():
    # A few bits differ, as on several threads.
    said = repeated([0.6, 0.60001, 0.6], [0.4, 0.4, 0.4])
    assert "The losses differ by +0.2. The runs of one policy are all" in said
    assert "more than those of one policy" not in said


def test_the_steps_after_the_first_are_in_five_blocks():
    assert verdict.blocks(np.arange(49)) == [4.5, 14.5, 24.5, 34.5, 44.0]


class Applied:
    """Stands for the counter of an optimizer."""

    def __init__(self):
        self.steps = self.calls = 0

    def applied(self):
        return self.steps

    def find_skips(self):
        pass


@pytest.mark.parametrize("seconds", [0.001, 0.3])
@pytest.mark.parametrize(
    ("epochs", "calls", "each", "is_enough"),
    [
        (1, 50, 1, True),
        (50, 1, 1, True),
        (7, 8, 1, True),
        (5, 5, 2, True),
        (1, 5, 10, True),
        # Two calls say nothing about how much the time varies.
        (1, 2, 25, False),
        (1, 49, 1, False),
        (7, 7, 1, False),
    ],
)
def test_fifty_steps_are_timed_however_they_come(
    epochs, calls, each, is_enough, seconds, monkeypatch
):
    clock, counter, group = [0.0], Applied(), steps.Group()
    monkeypatch.setattr(steps.time, "perf_counter", lambda: clock[0])

    def call(made):
        began = clock[0]
        clock[0] += seconds * made
        counter.steps += made
        group.called([counter], began, None)

    for _ in range(epochs):
        for _ in range(calls):
            call(each)
        # TensorFlow ends an epoch with a call without a batch.
        call(0)
    assert group.milliseconds() == pytest.approx(1000 * seconds)
    found = group.blocks()
    assert found == pytest.approx([1000 * seconds] * 5 * is_enough)


@pytest.mark.parametrize("count", [1, 7, 50, 256, 257, 10_000])
def test_a_loss_is_the_mean_over_the_last_tenth(count):
    losses = steps.Losses()
    assert not losses
    assert losses.last_tenth() is None
    for number in range(count):
        losses.add(np.float32(number))
    # Of a long run, it is the mean of the last.
    mean = np.mean(np.arange(count)[int(0.9 * count) :][-256:])
    assert losses.last_tenth() == pytest.approx(mean)


def test_a_bad_batch_at_the_end_does_not_count_and_bad_weights_do():
    losses = steps.Losses()
    for number in range(30):
        losses.add(np.float32(math.nan if number == 29 else 2.0))
    assert losses.last_tenth() == 2.0
    losses.add(np.float32(math.nan))
    losses.add(np.float32(math.nan))
    assert math.isnan(losses.last_tenth())
