"""The command line: parse, call, print, exit code."""

import argparse
import json
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from rich import console

from tfmix import commands

EXIT_CODES = """\
exit codes:
  0  done, nothing to object to
  1  done, and something is unhealthy (the output says what)
  2  the command or its input is wrong (the message says what to change)
"""
INTERRUPTED = 130  # what shells report for a program ended by Ctrl-C
_Command = Callable[[argparse.Namespace], commands.Outcome]


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
        return commands.OK
    try:
        outcome = options.command(options)
    except (ImportError, OSError, TypeError, ValueError) as error:
        print(f"tfmix {options.name}: error: {error}", file=sys.stderr)
        return commands.BAD_INPUT
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
    commands.run_devices: (
        "what the hardware can do, and the policy 'auto' takes here",
        ("", " --json"),
        {},
    ),
    commands.run_check: (
        "a saved model in 16 bit against itself in float32, layer by layer",
        (
            " model.keras --data batch.npz",
            " model.keras --data batch.npz --suggest --html report.html",
            " model.keras --data batch.npz --loss mse --json",
        ),
        _CHECK,
    ),
    commands.run_advise: (
        "shapes that keep 16-bit hardware waiting, and memory per policy",
        (
            " model.keras --batch-size 128",
            " model.keras --batch-size 128 --json",
        ),
        {**_MODEL, "--batch-size": _ROWS},
    ),
    commands.run_convert: (
        "a saved model into another policy, weights carried over",
        (
            " model.keras model16.keras --policy mixed_float16",
            " model.keras served.keras --policy bfloat16 --inference",
        ),
        _CONVERT,
    ),
    commands.run_demo: (
        "train on real scanned digits under three policies and compare",
        ("", " --epochs 4 --seeds 1 --out plots"),
        _DEMO,
    ),
    commands.run_bench: (
        "the benchmarks of a checkout, all or some",
        (" --list", " overhead peers", " sparse_memory --json"),
        _BENCH,
    ),
}
