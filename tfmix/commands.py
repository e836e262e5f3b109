"""The commands of the shell: each reads its input and calls one function."""

import argparse
import dataclasses
import importlib
import json
import pathlib
import subprocess
import sys
from typing import Any

import keras
import numpy as np
from rich import console, markup

from tfmix import _tables
from tfmix.conversion import convert
from tfmix.devices import devices, suited_policy
from tfmix.doctor import check
from tfmix.hardware import advise
from tfmix.policy import policy

OK, UNHEALTHY, BAD_INPUT = 0, 1, 2


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a command found: for people, for programs and for the shell."""

    # A string or anything rich can print; the same as plain JSON values.
    text: Any
    data: Any
    # The exit code.
    code: int = OK


def run_devices(options: argparse.Namespace) -> Outcome:
    """Lists the devices, and says what `"auto"` would choose."""
    found = devices()
    name, reason = suited_policy(found)
    rows = [
        (
            device.kind,
            device.name,
            ".".join(map(str, device.compute_capability or ())) or "-",
            "fast" if device.float16 else "not faster",
            "fast" if device.bfloat16 else "not faster",
        )
        for device in found
    ]
    heads = ("kind", "name", "capability", "float16", "bfloat16")
    note = f"'auto' is '{name}' here: {reason}"
    data = {
        "devices": [dataclasses.asdict(device) for device in found],
        "auto": name,
        "reason": reason,
    }
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
        suggested = report.suggested_policy(progress=not options.json)
        data["suggested_policy"] = repr(suggested)
        notes.append(_suggestion(suggested, report.policy))
    if options.html:
        report.to_html(options.html)
        notes.append(f"report: {options.html}")
    data["notes"] += notes
    text = console.Group(report, *map(markup.escape, notes))
    return Outcome(text, data, OK if report.healthy else UNHEALTHY)


def _suggestion(suggested: policy.Policy, base: policy.Policy) -> str:
    known = base.float32_layers
    added = [one for one in suggested.float32_layers if one not in known]
    extra = f" with {added} in float32 as well" if added else ""
    return f"suggested: {suggested.level or suggested.name!r}{extra}"


def run_advise(options: argparse.Namespace) -> Outcome:
    """Says where a saved model's shapes are slow, and what it weighs."""
    try:
        # An optimizer that was saved with the model has its slots counted.
        model = load_model(options.model, compiled=True)
    except ValueError:
        # A loss of the user's own keeps no one from counting the rest.
        model = load_model(options.model, compiled=False)
    advice = advise.advise(model, options.batch_size)
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
    json_only = ["--json"] if options.json else []
    ran = _benchmarks(root, [*options.names, *json_only], options.json)
    if options.json and not ran.stdout:
        raise ImportError("The benchmarks did not start; see above.")
    data = json.loads(ran.stdout) if options.json else None
    done = ", ".join(options.names or known)
    text = f"failed, see above: {done}" if ran.returncode else f"done: {done}"
    return Outcome(text, data, UNHEALTHY if ran.returncode else OK)


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
    _check_file(
        path,
        "Give the path of a model that was saved with "
        "`model.save('NAME.keras')`.",
    )
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
    """Reads inputs and targets from an `.npz` or inputs from an `.npy` file.

    In an `.npz`, `y` holds the targets (it may be missing) and `x` the inputs;
    a model with several inputs takes arrays by the inputs' names instead of
    `x`. The targets are None where there are none.
    """
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
    return arrays["x"] if "x" in arrays else arrays, y


def arranged(x: Any, model: keras.Model) -> Any:
    """Puts arrays given by name into the structure a model asks for.

    A model without `keras.Input`s takes a dict as it is.
    """
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
