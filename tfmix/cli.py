"""The command line: each command reads its input and calls one function."""

import argparse
import dataclasses
import importlib
import json
import pathlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from rich import console, markup

from tfmix import _tables
from tfmix.conversion import convert
from tfmix.devices import devices, suited_policy
from tfmix.doctor import check
from tfmix.hardware import advise

EXIT_CODES = """\
exit codes:
  0  done, nothing to object to
  1  done, and something is unhealthy (the output says what)
  2  the command or its input is wrong (the message says what to change)
"""
INTERRUPTED = 130  # what shells report for a program ended by Ctrl-C
OK, UNHEALTHY, BAD_INPUT = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command, as `python -m tfmix` and the `tfmix` script do.

    Args:
        arguments: The words after the program's name. Defaults to those of
            the process.

    Returns:
        The exit code: 0 for done, 1 for an unhealthy finding, 2 for a wrong
        input. Wrong words on the command line raise `SystemExit(2)`, as
        argparse does.

    Example:
        >>> main(["devices", "--json"])
        {...}
        0
    """
    parser = build_parser()
    options = parser.parse_args(arguments)
    if options.name is None:
        parser.print_help()
        return OK
    try:
        outcome = options.command(options)
    except (ImportError, OSError, TypeError, ValueError) as error:
        print(f"tfmix {options.name}: error: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print(f"tfmix {options.name}: interrupted", file=sys.stderr)
        return INTERRUPTED
    if options.json:
        print(json.dumps(outcome.data, indent=2))
    else:
        # A pipe has no width; wrapped advice would be no line to copy.
        width = None if sys.stdout.isatty() else 160
        console.Console(width=width).print(outcome.text)
    return outcome.code


def build_parser() -> argparse.ArgumentParser:
    """Builds a parser whose subcommands set `command` to what to call."""
    parser = argparse.ArgumentParser(
        prog="tfmix",
        description="Mixed-precision training for Keras 3, from a shell.",
        epilog="`tfmix COMMAND --help` shows a command's options.",
    )
    version = vars(sys.modules["tfmix"])["__version__"]
    parser.add_argument(
        "--version", action="version", version=f"tfmix {version}"
    )
    added = parser.add_subparsers(dest="name", metavar="COMMAND")
    for command, (summary, examples, options) in _COMMANDS.items():
        name = command.__name__.removeprefix("run_")
        lines = "\n".join(f"  tfmix {name}{words}" for words in examples)
        one = added.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=f"examples:\n{lines}\n\n{EXIT_CODES}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        one.add_argument(
            "--json", action="store_true", help="print JSON instead of a table"
        )
        one.set_defaults(command=command)
        for option, settings in options.items():
            one.add_argument(option, **settings)
    return parser


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a command found: for people, for programs and for the shell."""

    text: Any  # a string or anything rich can print
    data: Any  # the same as plain JSON values
    code: int = OK  # the exit code


def run_devices(options: argparse.Namespace) -> Outcome:
    """Lists the devices, and says what `"auto"` would choose."""
    found = devices()
    name, reason = suited_policy(found)
    speeds = ("not faster", "fast")
    rows = [
        (
            device.kind,
            device.name,
            ".".join(map(str, device.compute_capability or ())) or "-",
            speeds[device.float16],
            speeds[device.bfloat16],
        )
        for device in found
    ]
    heads = ("kind", "name", "capability", "float16", "bfloat16")
    note = f"'auto' is '{name}' here: {reason}"
    listed = [dataclasses.asdict(device) for device in found]
    data = {"devices": listed, "auto": name, "reason": reason}
    return Outcome(_tables.Table(heads, rows, notes=[note]), data)


def run_check(options: argparse.Namespace) -> Outcome:
    """Checks a saved model in 16 bit on a batch from a file."""
    if options.html:
        _check_folder(options.html)
    x, y = read_batch(options.data, options.rows)
    # A loss that is given replaces the compiled one, which then need not load.
    model = load_model(options.model, compiled=options.loss is None)
    x = arranged(x, model)
    notes = []
    if y is not None and not (options.loss or getattr(model, "loss", None)):
        y = None
        notes.append(
            "The model has no loss, so only the forward pass was "
            "checked; give one with --loss."
        )
    try:
        report = check.checked(
            model, x, y, loss=options.loss, policy=options.policy, rows=None
        )
    except (TypeError, ValueError):
        raise
    except Exception as error:
        # Each backend has exceptions of its own for data that do not fit.
        raise ValueError(
            f"The model could not be checked on {str(options.data)!r}: "
            f"{type(error).__name__}: {error}"
        ) from error
    data = json.loads(report.to_json())
    if options.suggest:
        policy = report.suggested_policy(progress=not options.json)
        data["suggested_policy"] = repr(policy)
        known = report.policy.float32_layers
        added = [one for one in policy.float32_layers if one not in known]
        extra = f" with {added} in float32 as well" if added else ""
        notes.append(f"suggested: {policy.level or policy.name!r}{extra}")
    if options.html:
        report.to_html(options.html)
        notes.append(f"report: {options.html}")
    data["notes"] += notes
    text = console.Group(report, *map(markup.escape, notes))
    return Outcome(text, data, OK if report.healthy else UNHEALTHY)


def run_advise(options: argparse.Namespace) -> Outcome:
    """Says where a saved model's shapes are slow, and what it weighs."""
    try:
        # An optimizer that was saved with the model has its slots counted.
        model = load_model(options.model, compiled=True)
    except ValueError:
        # A loss of the user's own keeps no one from counting the rest.
        model = load_model(options.model, compiled=False)
    shape = options.input_shape and tuple(options.input_shape)
    advice = advise.advise(model, options.batch_size, input_shape=shape)
    return Outcome(advice, json.loads(advice.to_json()))


def run_convert(options: argparse.Namespace) -> Outcome:
    """Converts a saved model and saves the result."""
    target = options.target
    if target.suffix != ".keras":
        raise ValueError(
            f"The converted model is written in Keras's own format. Received: "
            f"target={str(target)!r}. Give it a name that ends in `.keras`."
        )
    if target.exists() and not options.overwrite:
        raise ValueError(
            f"{str(target)!r} exists already. Give another name, or "
            "`--overwrite`."
        )
    _check_folder(target)
    model = load_model(options.source, compiled=not options.inference)
    report = convert.apply_policy(model, options.policy)
    model.save(target)
    data = {
        "policy": options.policy,
        "target": str(target),
        "rows": [dataclasses.asdict(row) for row in report.rows],
        "notes": list(report.notes),
    }
    written = markup.escape(f"written: {target}")
    return Outcome(console.Group(report, written), data)


def run_demo(options: argparse.Namespace) -> Outcome:
    """Trains on scanned digits under three policies."""
    try:
        # Lies in `examples/` of the repository; setup.cfg puts it here.
        digits = importlib.import_module("tfmix.examples.digits")
    except ModuleNotFoundError as error:
        raise ImportError(
            f"The demo needs the module {error.name!r}, which is not "
            "installed. Run `pip install 'tfmix[examples]'`, or "
            "`pip install -e '.[examples]'` in a checkout."
        ) from error
    given = {"epochs": options.epochs, "seeds": options.seeds}
    settings = {name: v for name, v in given.items() if v is not None}
    report = digits.run(out=options.out, quiet=options.json, **settings)
    code = OK if report.healthy else UNHEALTHY
    return Outcome(report.table(), report.to_dict(), code)


def run_bench(options: argparse.Namespace) -> Outcome:
    """Runs the benchmarks of the checkout, each in a process of its own."""
    root = pathlib.Path(__file__).parents[1]
    if not (root / "benchmarks" / "__main__.py").is_file():
        raise ImportError(
            "The benchmarks lie in tfmix's repository and are not installed "
            f"with it. Received: an installation in {str(root)!r}. Run `tfmix "
            "bench` from a checkout, after `pip install -e .` there."
        )
    known = json.loads(_benchmarks(root, ["--list", "--json"]).stdout)
    if unknown := [name for name in options.names if name not in known]:
        raise ValueError(
            f"There is no such benchmark. Received: {unknown!r}. There are: "
            f"{', '.join(known)}. Without a name, all are run."
        )
    if options.list:
        return Outcome("\n".join(known), known)
    words = [*options.names, *(["--json"] if options.json else [])]
    ran = _benchmarks(root, words, options.json)
    if options.json and not ran.stdout:
        raise ImportError("The benchmarks did not start; see above.")
    data = json.loads(ran.stdout) if options.json else None
    done = ", ".join(options.names or known)
    if ran.returncode:
        return Outcome(f"failed, see above: {done}", data, UNHEALTHY)
    return Outcome(f"done: {done}", data)


def _benchmarks(
    root: pathlib.Path, words: list[str], captured: bool = True
) -> subprocess.CompletedProcess:
    """Runs `python -m benchmarks`; its messages and tables are shown."""
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *words],
        cwd=root,
        stdout=subprocess.PIPE if captured else None,
        text=True,
        check=False,
    )


def load_model(path: pathlib.Path, compiled: bool) -> keras.Model:
    """Loads a model from a `.keras` file, with optimizer and loss or not."""
    saved = "a model that was saved with `model.save('NAME.keras')`."
    _check_file(path, f"Give the path of {saved}")
    try:
        return keras.saving.load_model(path, compile=compiled)
    except Exception as error:
        # A broken file makes Keras raise what its parts raise: zipfile's
        # errors, h5py's, KeyError for a missing entry.
        raise ValueError(
            f"Keras cannot load {str(path)!r}: {type(error).__name__}: "
            f"{error} A model with classes of your own is checked from "
            "Python, where they are known."
        ) from error


def _check_file(path: pathlib.Path, advice: str) -> None:
    if path.is_dir():
        raise ValueError(f"{str(path)!r} is a directory, no file. {advice}")
    if not path.is_file():
        raise ValueError(f"There is no file {str(path)!r}. {advice}")


def _check_folder(path: pathlib.Path) -> None:
    """Refuses a file to write in a folder that is not there."""
    if not path.parent.is_dir():
        raise ValueError(
            f"There is no folder {str(path.parent)!r} to write {path.name!r} "
            "in. Make it first, or give another path."
        )


def read_batch(path: pathlib.Path, rows: int) -> tuple[Any, Any]:
    """Reads `x`, or inputs by name, and `y` from `.npz`, `x` from `.npy`."""
    if rows < 1:
        raise ValueError(f"`rows` must be at least 1. Received: rows={rows!r}.")
    _check_file(
        path, "Write one with `numpy.savez('NAME.npz', x=inputs, y=targets)`."
    )
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return loaded[:rows], None
        arrays = {name: loaded[name][:rows] for name in loaded.files}
    except Exception as error:
        # NumPy raises zipfile's, zlib's and its own errors on a broken file.
        raise ValueError(
            f"NumPy cannot read {str(path)!r}: {type(error).__name__}: {error}"
        ) from error
    y = arrays.pop("y", None)
    if not arrays:
        raise ValueError(
            f"{str(path)!r} holds no inputs. Received the arrays: "
            f"{loaded.files!r}. Save them as `x`, or by the inputs' names."
        )
    return arrays.get("x", arrays), y


def arranged(x: Any, model: keras.Model) -> Any:
    """Puts arrays given by name into the structure of a model's inputs."""
    inputs = getattr(model, "input", None)
    if not isinstance(x, dict) or inputs is None:
        return x
    names = [tensor.name for tensor in keras.tree.flatten(inputs)]
    if missing := [name for name in names if name not in x]:
        raise ValueError(
            f"There is no array for the inputs {missing!r}. Received the "
            f"arrays: {sorted(x)!r}. Save each by its input's name, or the "
            "only one as `x`."
        )
    return keras.tree.map_structure(lambda tensor: x[tensor.name], inputs)


_Command = Callable[[argparse.Namespace], Outcome]
_Options = dict[str, dict[str, Any]]
_MODEL: _Options = {"model": {"type": pathlib.Path, "help": "a .keras file"}}


def _flag(summary: str) -> dict[str, Any]:
    return {"action": "store_true", "help": summary}


def _file(summary: str, **settings: Any) -> dict[str, Any]:
    return {"type": pathlib.Path, "help": summary, **settings}


_CHECK: _Options = {
    **_MODEL,
    "--data": _file(
        ".npz with x and y (or inputs by name), or .npy with x", required=True
    ),
    "--loss": {"help": "a loss of Keras (default: the compiled one)"},
    "--policy": {
        "help": "mixed_float16, mixed_bfloat16, ... (default: its own)"
    },
    "--rows": {"type": int, "default": 64, "help": "rows to use (default: 64)"},
    "--suggest": _flag("search a policy that is healthy"),
    "--html": _file("write a report to this file"),
}
_ROWS = {"type": int, "required": True, "help": "rows of a training batch"}
_SHAPE = {"type": int, "nargs": "+", "help": "sizes of one row, if left free"}
_CONVERT: _Options = {
    "source": _file("a .keras file"),
    "target": _file("the file to write"),
    "--policy": {"required": True, "help": "mixed_float16, bfloat16, O2, ..."},
    "--inference": _flag("leave out the optimizer and the loss"),
    "--overwrite": _flag("replace an existing file"),
}
_DEMO: _Options = {
    "--epochs": {"type": int, "help": "passes over the data"},
    "--seeds": {"type": int, "help": "runs per policy"},
    "--out": {"default": "out", "help": "folder for the plot (default: out)"},
}
_BENCH: _Options = {
    "names": {"nargs": "*", "metavar": "NAME", "help": "which to run"},
    "--list": _flag("print the names, run nothing"),
}
# By function: summary, the words of the examples, and the options.
_COMMANDS: dict[_Command, tuple[str, tuple[str, ...], _Options]] = {
    run_devices: (
        "what the hardware can do, and the policy 'auto' takes here",
        ("", " --json"),
        {},
    ),
    run_check: (
        "a saved model in 16 bit against itself in float32, layer by layer",
        (
            " model.keras --data batch.npz",
            " model.keras --data batch.npz --suggest --html report.html",
            " model.keras --data batch.npz --loss mse --json",
        ),
        _CHECK,
    ),
    run_advise: (
        "shapes that keep 16-bit hardware waiting, and memory per policy",
        (
            " model.keras --batch-size 128",
            " model.keras --batch-size 128 --json",
        ),
        {**_MODEL, "--batch-size": _ROWS, "--input-shape": _SHAPE},
    ),
    run_convert: (
        "a saved model into another policy, weights carried over",
        (
            " model.keras model16.keras --policy mixed_float16",
            " model.keras served.keras --policy bfloat16 --inference",
        ),
        _CONVERT,
    ),
    run_demo: (
        "train on real scanned digits under three policies and compare",
        ("", " --epochs 4 --seeds 1 --out plots"),
        _DEMO,
    ),
    run_bench: (
        "the benchmarks of a checkout, all or some",
        (" --list", " overhead peers", " sparse_memory --json"),
        _BENCH,
    ),
}
