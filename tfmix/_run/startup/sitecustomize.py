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
import sys
from typing import Any

_HERE = pathlib.Path(__file__).resolve().parent
_TFMIX = _HERE.parents[2]  # the folder that holds the package


class _AfterKeras(importlib.abc.MetaPathFinder):
    """Finds Keras, and imports tfmix once Keras is there."""

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "keras":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            _import_tfmix()

        vars(spec.loader)["exec_module"] = exec_module
        return spec


def _import_tfmix() -> None:
    if importlib.util.find_spec("tfmix") is None:
        sys.path.append(str(_TFMIX))
    try:
        importlib.import_module("tfmix")
    except (ImportError, ValueError) as error:
        print(f"tfmix run: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _mark_process() -> None:
    """Tells the processes that the script starts that they are its own."""
    settings = json.loads(os.environ["TFMIX_RUN"])
    if "process" not in settings:
        settings["process"] = os.getpid()
        os.environ["TFMIX_RUN"] = json.dumps(settings)
        atexit.register(_say_what_is_missing, os.getpid())


def _say_what_is_missing(process: int) -> None:
    if process == os.getpid() and "tfmix" not in sys.modules:
        print(
            "tfmix run: the script did not import Keras 3, so there is nothing "
            "to report.",
            file=sys.stderr,
        )


def _import_next() -> None:
    """Runs the next `sitecustomize` on the path, if there is one."""
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


sys.path[:] = [
    path for path in sys.path if pathlib.Path(path).resolve() != _HERE
]
if "TFMIX_RUN" in os.environ:
    sys.meta_path.insert(0, _AfterKeras())
    _mark_process()
_import_next()
