"""Imports tfmix in a script of `tfmix run` as soon as that imports Keras.

Python imports this file when it starts, because `tfmix run` puts its folder
first on PYTHONPATH. Python itself then runs the script, which may still choose
a backend before it imports Keras. Processes that the script starts inherit the
folder.
"""

import atexit
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import pathlib
import shutil
import sys
from collections.abc import Callable, Mapping
from typing import Any

_HERE = pathlib.Path(__file__).resolve().parent
_TFMIX = _HERE.parents[3]  # the folder that holds the package
_FAILED = 2
# Why tfmix could not be imported, if it could not. It has been printed.
_errors: list[str] = []


class _After(importlib.abc.MetaPathFinder):
    """Calls a function each time that a module of some name was executed.

    To find a module is not to import it: TensorFlow asks some fifteen times
    where Keras is before it imports it.
    """

    def __init__(self, functions: Mapping[str, Callable[[Any], None]]) -> None:
        self._functions = functions

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self._functions:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next(filter(None, found), None)
        if spec is None or spec.loader is None:
            return spec
        execute, then = spec.loader.exec_module, self._functions[name]

        def exec_module(module: Any) -> None:
            execute(module)
            then(module)

        vars(spec.loader)["exec_module"] = exec_module
        return spec


def _import_tfmix(keras: Any) -> None:
    if importlib.util.find_spec("tfmix") is None:
        sys.path.append(str(_TFMIX))
    try:
        importlib.import_module("tfmix")
    except (ImportError, ValueError) as error:
        print(f"tfmix run: error: {error}", file=sys.stderr)
        _errors.append(str(error))
        raise SystemExit(_FAILED) from None


def _seeds(seed: int) -> dict[str, Callable[[Any], None]]:
    """Seeds Python's generator, and returns what seeds the others.

    Each is seeded before the script can do so, whose own seeds thus hold.
    """
    import random

    random.seed(seed)
    return {
        "numpy.random": lambda numpy_random: numpy_random.seed(seed),
        "tensorflow": lambda tensorflow: tensorflow.random.set_seed(seed),
    }


def _mark_process(settings: dict[str, Any]) -> None:
    """Tells the processes that the script starts that they are its own."""
    if "process" not in settings:
        settings["process"] = os.getpid()
        os.environ["TFMIX_RUN"] = json.dumps(settings)
        # It was registered first, so it runs last.
        atexit.register(_end, settings)


def _end(settings: dict[str, Any]) -> None:
    """Removes temporary files, and says why there is no report, if so.

    There is none if Keras did not run in this process.
    """
    if settings["process"] != os.getpid():
        return
    for path in settings.get("before", ())[:1]:
        shutil.rmtree(os.path.dirname(path), ignore_errors=True)
    unused = pathlib.Path(settings["unused"])
    is_used = not unused.exists()
    if is_used and "tfmix" in sys.modules:
        return
    unused.unlink(missing_ok=True)
    error = _errors[0] if _errors else _why_nothing(is_used)
    if settings.get("file"):
        text = json.dumps(
            {
                "script": os.path.basename(sys.argv[0]),
                "runs": [],
                "others": [],
                "error": error,
            }
        )
        pathlib.Path(settings["file"]).write_text(text, "utf-8")
    if not _errors:
        word = "" if is_used else "error: "
        print(f"tfmix run: {word}{error}", file=sys.stderr)
    # Nothing else could change the exit code now. Python has one of its own
    # after an error.
    if not is_used and getattr(sys, "last_value", None) is None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_FAILED)


def _why_nothing(is_used: bool) -> str:
    if is_used:
        return (
            "Keras ran only in processes that the script started. Each that "
            "trained has reported; there is no report of the whole."
        )
    if "tf_keras" in sys.modules:
        return (
            "the script uses tf_keras, which is Keras 2, and tfmix needs Keras "
            "3. Write `import keras` in its place, and leave the environment "
            "variable TF_USE_LEGACY_KERAS unset."
        )
    return (
        "the script ended before it made a layer or an optimizer of Keras 3, "
        "so it ran as under `python`, and there is nothing to report. Give a "
        "script that trains with `keras` or `tf.keras` (TensorFlow 2.16 or "
        "later)."
    )


def _import_next() -> None:
    """Runs the next `sitecustomize` on the path, if there is one."""
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _begin(settings: dict[str, Any]) -> None:
    functions: dict[str, Callable[[Any], None]] = {"keras": _import_tfmix}
    if (seed := settings.get("seed")) is not None:
        functions |= _seeds(seed)
    sys.meta_path.insert(0, _After(functions))
    _mark_process(settings)


sys.path[:] = [
    path for path in sys.path if pathlib.Path(path).resolve() != _HERE
]
if "TFMIX_RUN" in os.environ:
    _begin(json.loads(os.environ["TFMIX_RUN"]))
_import_next()
