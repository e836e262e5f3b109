"""Runs each command of the shell: reads its input, calls one function."""

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import pathlib
import textwrap
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
from rich import console, markup, text

from tfmix import _messages
from tfmix.autocast import global_policy
from tfmix.conversion import convert
from tfmix.policy.devices import suited_policy
from tfmix.tools import demo
from tfmix.tools.diagnostics import check, environment
from tfmix.tools.hardware import advice as advise
from tfmix.tools.hardware import compiling
from tfmix.tools.hardware.device_table import devices


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A command's result: for people, for programs and for the shell."""

    text: Any  # a string or anything rich can print
    data: Any  # the same as plain JSON values
    healthy: bool = True  # true if nothing is wrong


def run_devices(options: argparse.Namespace) -> Outcome:
    """Lists the devices, and the policy that `"auto"` would choose."""
    usable = devices()
    name, reason = suited_policy(usable)
    listed = [dataclasses.asdict(device) for device in usable]
    data = {"devices": listed, "auto": name, "reason": reason}
    return Outcome(usable, data)


def run_doctor(options: argparse.Namespace) -> Outcome:
    """Lists versions, backend, devices and policy."""
    current = environment.environment()
    return Outcome(current, dataclasses.asdict(current))


def run_check(options: argparse.Namespace) -> Outcome:
    """Checks a saved model in 16 bit on a batch from a file."""
    x, y = read_batch(options.data)
    # A given loss replaces the compiled one, which need not load then.
    model = load_model(options.model, compiled=options.loss is None)
    notes = []
    if y is not None and not (options.loss or getattr(model, "loss", None)):
        y = None
        notes.append(
            "The model has no loss, so only the forward pass was "
            "checked; give one with --loss."
        )
    try:
        report = check.check(
            model, x, y, loss=options.loss, policy=options.policy
        )
    except Exception as error:
        # Keras adds the values of all arguments to an error of a layer.
        said, cut, _ = str(error).partition("Arguments received by")
        if isinstance(error, TypeError | ValueError) and not cut:
            raise
        # Each backend raises its own exceptions for data that do not fit.
        raise ValueError(
            f"The model could not be checked on {str(options.data)!r}: "
            f"{type(error).__name__}: {textwrap.shorten(said, 500)}"
        ) from error
    data = json.loads(report.to_json())
    if options.suggest:
        policy = report.suggested_policy()
        data["suggested_policy"] = repr(policy)
        known = report.policy.float32_layers
        added = [layer for layer in policy.float32_layers if layer not in known]
        extra = f" with {added} in float32 as well" if added else ""
        notes.append(f"suggested: {policy.level or policy.name!r}{extra}")
    notes.append("headroom: how often a value can double before it overflows.")
    data["notes"] += notes
    report = dataclasses.replace(report, verbose=options.verbose)
    text = console.Group(report, *map(markup.escape, notes))
    return Outcome(text, data, report.healthy)


def run_advise(options: argparse.Namespace) -> Outcome:
    """Reports where a saved model's shapes are slow, and its memory."""
    # The state of an optimizer that was saved with the model counts, too.
    model = _loaded(options.model)
    shape = options.input_shape and tuple(options.input_shape)
    advice = advise.advise(
        model, options.batch_size, input_shape=shape, target=options.target
    )
    return Outcome(advice, json.loads(advice.to_json()))


def run_compile(options: argparse.Namespace) -> Outcome:
    """Compiles a saved model's training step for another machine."""
    model = _loaded(options.model)
    step = compiling.compile_for(
        model,
        options.batch_size,
        target=options.target,
        policy=options.policy,
    )
    return Outcome(step, json.loads(step.to_json()))


def _loaded(path: pathlib.Path) -> keras.Model:
    try:
        return load_model(path, compiled=True)
    except ValueError:
        # A loss of the user's own should not prevent the other counts.
        return load_model(path, compiled=False)


def run_convert(options: argparse.Namespace) -> Outcome:
    """Converts a saved model and saves the result."""
    target = options.target
    if target.exists() and not options.overwrite:
        raise ValueError(
            f"{str(target)!r} exists already. Give another name, or "
            "`--overwrite`."
        )
    model = load_model(options.source, compiled=not options.inference)
    with _messages.silenced():
        # Its messages are part of its report, which is printed.
        policy = global_policy.resolve_policy(options.policy)
        model, report, _ = convert.converted_copy(model, policy)
    model.save(target)
    auto = [devices().auto()] if options.policy == "auto" else []
    data = {
        "policy": options.policy,
        "target": str(target),
        "rows": [dataclasses.asdict(row) for row in report.rows],
        "notes": [*auto, *report.notes],
    }
    # A wrapped path cannot be copied.
    written = text.Text(f"written: {target}", no_wrap=True, overflow="ignore")
    notes = map(markup.escape, auto)
    return Outcome(console.Group(report, *notes, written), data)


def run_demo(options: argparse.Namespace) -> Outcome:
    """Trains on scanned digits under three policies."""
    if importlib.util.find_spec("sklearn") is None:
        raise ImportError(
            "The demo needs the module 'sklearn', whose digits it learns. Run "
            "`pip install scikit-learn`."
        )
    report = demo.run(options.epochs, options.seeds, quiet=options.json)
    return Outcome(report, report.to_dict(), report.healthy)


def load_model(path: pathlib.Path, compiled: bool) -> keras.Model:
    """Loads a model from a `.keras` file, with or without compiled parts."""
    with _reading(path, "Save a model with `model.save('NAME.keras')`."):
        return keras.saving.load_model(path, compile=compiled)


@contextlib.contextmanager
def _reading(path: pathlib.Path, advice: str) -> Iterator[None]:
    """Names the file in each error of a block, and says how to write it."""
    try:
        yield
    except Exception as error:
        # Keras and NumPy pass on errors of zipfile, h5py and zlib.
        raise ValueError(
            f"Cannot load {str(path)!r}: {type(error).__name__}: {error} "
            f"{advice}"
        ) from error


def read_batch(path: pathlib.Path) -> tuple[Any, Any]:
    """Reads `x`, or inputs by name, and `y` from `.npz`, `x` from `.npy`."""
    advice = "Write one with `numpy.savez('NAME.npz', x=inputs, y=targets)`."
    with _reading(path, advice):
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return loaded, None
        arrays = dict(loaded)
    y = arrays.pop("y", None)
    if not arrays:
        raise ValueError(f"{str(path)!r} holds no inputs. {advice}")
    # The only array is the inputs under any name.
    return next(iter(arrays.values())) if len(arrays) == 1 else arrays, y
