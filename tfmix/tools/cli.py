"""The command line: reads its words, then starts what they ask for.

It imports nothing of tfmix before it has understood the words, so that help and
a wrong word need not wait for TensorFlow. `tfmix_script.py` runs this file.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import pathlib
import re
import runpy
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

EXIT_CODES = """\
exit codes:
  0  done, nothing to object to
  1  done, and something is unhealthy (the output says what)
  2  the command or its input is wrong (the message says what to change)
"""
EXIT_CODES_OF_RUN = """\
exit codes:
  the script's own; of a comparison, that of the first run that fails, and no
  more runs are started
  2 also if the words are wrong, both runs would be in the same policy, or the
  script ended without Keras 3
"""
INTERRUPTED = 130  # what shells report for a program ended by Ctrl-C
OK, UNHEALTHY, BAD_INPUT = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command, as `python -m tfmix` and the `tfmix` script do.

    Args:
        arguments: The words after the program's name. Defaults to those of the
            process.

    Returns:
        The exit code: 0 for success, 1 for an unhealthy finding, 2 for wrong
            input. Wrong words on the command line raise `SystemExit(2)`, like
            argparse.

    Examples:
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
        if options.name == "run":
            return _launch(options)
        return _run(options)
    except (ImportError, OSError, TypeError, ValueError) as error:
        print(f"tfmix {options.name}: error: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print(f"tfmix {options.name}: interrupted", file=sys.stderr)
        return INTERRUPTED


def _run(options: argparse.Namespace) -> int:
    if options.name == "compile" and "keras" not in sys.modules:
        # It runs nothing on a GPU or a TPU, and compiles what JAX runs.
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        if importlib.util.find_spec("jax") is not None:
            os.environ["KERAS_BACKEND"] = "jax"
    with startup_log_held_back() as stderr:
        from rich import console

        # The backend takes seconds to load.
        terminal = console.Console(file=stderr, quiet=not stderr.isatty())
        with terminal.status("Loading Keras and its backend"):
            from tfmix.tools import commands

    outcome = getattr(commands, f"run_{options.name}")(options)
    if options.json:
        print(json.dumps(outcome.data, indent=2))
    else:
        # A pipe has no width, and wrapped advice could not be copied.
        is_known = sys.stdout.isatty() or "COLUMNS" in os.environ
        width = None if is_known else 160
        console.Console(width=width).print(outcome.text, crop=False)
    return OK if outcome.healthy else UNHEALTHY


def _launch(options: argparse.Namespace) -> int:
    """Starts a script with a policy; this process never imports Keras."""
    if options.repeat < 1:
        raise ValueError(
            "`--repeat` must be at least 1. Received: --repeat "
            f"{options.repeat}."
        )
    if options.repeat > 1 and not options.against:
        raise ValueError(
            "`--repeat` repeats a comparison. Add the policy to compare with: "
            "`--against float32`."
        )
    words = options.words
    if not words:
        raise ValueError(
            "There is no script to run. Write `tfmix run train.py`, or `tfmix "
            "run -m package.train`; options of tfmix stand before it."
        )
    if options.module:
        words = ["-m", *words]
    place = options.report
    if place and not os.path.isdir(os.path.dirname(os.path.abspath(place))):
        raise ValueError(
            f"There is no folder to write {place!r} in. Make it first, or give "
            "another path."
        )
    launcher = runpy.run_path(
        str(pathlib.Path(__file__).with_name("run") / "launcher.py")
    )
    code = launcher["run"](
        words,
        options.policy,
        options.against,
        options.repeat,
        place,
        options.json,
    )
    return int(code)


@contextlib.contextmanager
def startup_log_held_back() -> Iterator[TextIO]:
    """Holds back TensorFlow's startup log, unless it fails to start.

    Its libraries write past Python, in part at any log level. It yields a
    stream to stderr that stays open.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with tempfile.TemporaryFile() as log, os.fdopen(os.dup(2), "w") as stderr:
        os.dup2(log.fileno(), 2)
        try:
            yield stderr
        except BaseException:
            log.seek(0)
            os.write(stderr.fileno(), log.read())
            raise
        finally:
            os.dup2(stderr.fileno(), 2)


def build_parser() -> argparse.ArgumentParser:
    """Builds the parser; `name` is the command's, `None` without one."""
    parser = argparse.ArgumentParser(
        prog="tfmix",
        description="Mixed-precision training for Keras 3, from a shell.",
        epilog="`tfmix COMMAND --help` shows a command's options.",
    )
    parser.add_argument(
        "--version", action="version", version=f"tfmix {_version()}"
    )
    added = parser.add_subparsers(dest="name", metavar="COMMAND")
    for name, (summary, examples, options) in _COMMANDS.items():
        lines = "\n".join(f"  tfmix {name}{words}" for words in examples)
        command = added.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=f"examples:\n{lines}\n\n"
            + (EXIT_CODES_OF_RUN if name == "run" else EXIT_CODES),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for option, settings in {**_JSON, **options}.items():
            # All commands use one name, and a short form of it.
            short = ["--batch"] if option == "--batch-size" else []
            command.add_argument(option, *short, **settings)
    return parser


def _version() -> str:
    """Reads the version from the source, without importing it."""
    source = pathlib.Path(__file__).parents[1] / "__init__.py"
    (version,) = re.findall(r'^__version__ = "(.+)"$', source.read_text(), re.M)
    return str(version)


_Options = dict[str, dict[str, Any]]
_JSON: _Options = {
    "--json": {"action": "store_true", "help": "print JSON instead of a table"}
}
_MODEL: _Options = {"model": {"type": pathlib.Path, "help": "a .keras file"}}


def _flag(summary: str) -> dict[str, Any]:
    return {"action": "store_true", "help": summary}


def _file(summary: str, **settings: Any) -> dict[str, Any]:
    return {"type": pathlib.Path, "help": summary, **settings}


# These are `tfmix.policy.policy.NAMES`, which cannot be imported without Keras.
_POLICIES = (
    *("float32", "mixed_float16", "mixed_bfloat16", "float16", "bfloat16"),
    *("mixed_float8", "auto", "O0", "O1", "O2", "O3"),
)


def _policy(summary: str, **settings: Any) -> dict[str, Any]:
    summary = f"{', '.join(_POLICIES)}; {summary}"
    own = {"choices": _POLICIES, "metavar": "POLICY", "help": summary}
    return {**own, **settings}


_CHECK: _Options = {
    **_MODEL,
    "--data": _file(
        ".npz with x and y (or inputs by name), or .npy with x; the first 64 "
        "rows are checked",
        required=True,
    ),
    "--loss": {"help": "a loss of Keras (default: the compiled one)"},
    "--policy": _policy(
        "default: the model's own, for a float32 model mixed_float16"
    ),
    "--suggest": _flag("suggest a policy with the layers at fault in float32"),
    "--verbose": _flag("print every layer, not the worst alone"),
}
_ROWS = {"type": int, "required": True, "help": "rows of a training batch"}
_SHAPE = {"type": int, "nargs": "+", "help": "sizes of one row, if left free"}
_COMPILE: _Options = {
    **_MODEL,
    "--target": {
        "default": "h200",
        "help": "a GPU, v100 to b200, whose compiler is an extra of 3 GB: `pip "
        "install '.[nvidia]'` in tfmix's folder; or a TPU, v4 to v6e: `.[tpu]` "
        "(default: h200)",
    },
    "--batch-size": _ROWS,
    "--policy": _policy("default: the model's own"),
}
_CONVERT: _Options = {
    "source": _file("a .keras file"),
    "target": _file("the file to write"),
    "--policy": _policy("what to convert to", required=True),
    "--inference": _flag("leave out the optimizer and the loss"),
    "--overwrite": _flag("replace an existing file"),
}
_DEMO: _Options = {
    "--epochs": {"type": int, "default": 6, "help": "passes over the data"},
    "--seeds": {"type": int, "default": 2, "help": "runs per policy"},
}
_RUN: _Options = {
    "--policy": _policy(
        "replaces the script's own (default: the script's own, else auto, "
        "which suits the device)"
    ),
    "--against": _policy("run in this policy first, and compare"),
    "--repeat": {
        "type": int,
        "default": 1,
        "metavar": "N",
        "help": "with --against: N runs in each policy, in turns (default: 1)",
    },
    "--report": {
        "metavar": "FILE",
        "help": "write the report to this file as JSON, too",
    },
    "-m": {
        "action": "store_true",
        "dest": "module",
        "help": "run a module, as `python -m` does",
    },
    "words": {
        "nargs": argparse.REMAINDER,
        "metavar": "SCRIPT ...",
        "help": "a script or module, and its arguments",
    },
}
# Maps a name to its summary, its examples' words and its options.
_COMMANDS: dict[str, tuple[str, tuple[str, ...], _Options]] = {
    "run": (
        "run a script as it is in 16 bit, and report steps, time and loss",
        (
            " train.py --epochs 3",
            " --policy mixed_float16 -m package.train",
            " --against float32 train.py",
            " --policy mixed_bfloat16 --against float32 --repeat 3 train.py",
        ),
        _RUN,
    ),
    "devices": (
        "list what the hardware can do, and the policy that 'auto' takes",
        ("", " --json"),
        {},
    ),
    "doctor": (
        "list versions, devices and policy for a bug report",
        ("", " --json"),
        {},
    ),
    "check": (
        "compare a saved model in 16 bit with float32, layer by layer",
        (
            " model.keras --data batch.npz",
            " model.keras --data batch.npz --suggest --verbose",
            " model.keras --data batch.npz --loss mse --json",
        ),
        _CHECK,
    ),
    "advise": (
        "find shapes that are slow in 16 bit, and estimate the memory",
        (
            " model.keras --batch-size 128",
            " model.keras --batch-size 128 --target v5e --json",
        ),
        {
            **_MODEL,
            "--batch-size": _ROWS,
            "--input-shape": _SHAPE,
            "--target": {
                "help": "whose memory it has to fit, v5e for example (default: "
                "none)"
            },
        },
    ),
    "compile": (
        "compile a saved model's training step for a GPU or TPU that is "
        "not here",
        (
            " model.keras --target h200 --batch-size 64",
            " model.keras --target v5e --batch-size 64 --json",
            " model.keras --batch-size 64 --policy mixed_bfloat16",
        ),
        _COMPILE,
    ),
    "convert": (
        "convert a saved model to another policy, with its weights",
        (
            " model.keras model16.keras --policy mixed_float16",
            " model.keras served.keras --policy bfloat16 --inference",
        ),
        _CONVERT,
    ),
    "demo": (
        "train on real scanned digits under three policies and compare",
        ("", " --epochs 6 --seeds 1"),
        _DEMO,
    ),
}
