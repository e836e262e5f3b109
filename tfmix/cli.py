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
PIPE_WIDTH = 160
INTERRUPTED = 130  # what shells report for a program ended by Ctrl-C


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
        width = None if sys.stdout.isatty() else PIPE_WIDTH
        console.Console(width=width).print(outcome.text)
    return outcome.code


def build_parser() -> argparse.ArgumentParser:
    """Builds the parser with one subcommand per public capability.

    Returns:
        The parser; each subcommand sets `command` to the function to call.
    """
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
    _add(
        added,
        "devices",
        commands.run_devices,
        "what the hardware can do, and the policy 'auto' takes here",
        "tfmix devices",
        "tfmix devices --json",
    )
    _add_check(added)
    _add_advise(added)
    _add_convert(added)
    _add_demo(added)
    _add_bench(added)
    return parser


def _add_bench(added: Any) -> None:
    parser = _add(
        added,
        "bench",
        commands.run_bench,
        "the benchmarks of a checkout, all or some",
        "tfmix bench --list",
        "tfmix bench overhead peers",
        "tfmix bench sparse_memory --json",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="which to run")
    parser.add_argument(
        "--list", action="store_true", help="print the names, run nothing"
    )


def _add_demo(added: Any) -> None:
    parser = _add(
        added,
        "demo",
        commands.run_demo,
        "train on real scanned digits under three policies and compare",
        "tfmix demo",
        "tfmix demo --epochs 4 --seeds 1 --out plots",
    )
    parser.add_argument("--epochs", type=int, help="passes over the data")
    parser.add_argument("--seeds", type=int, help="runs per policy")
    parser.add_argument(
        "--out", default="out", help="folder for the plot (default: out)"
    )


def _add_check(added: Any) -> None:
    parser = _add(
        added,
        "check",
        commands.run_check,
        "a saved model in 16 bit against itself in float32, layer by layer",
        "tfmix check model.keras --data batch.npz",
        "tfmix check model.keras --data batch.npz --suggest --html report.html",
        "tfmix check model.keras --data batch.npz --loss mse --json",
    )
    parser.add_argument("model", type=pathlib.Path, help="a .keras file")
    parser.add_argument(
        "--data",
        type=pathlib.Path,
        required=True,
        help=".npz with x and y (or inputs by name), or .npy with x",
    )
    parser.add_argument(
        "--loss", help="a loss of Keras (default: the compiled one)"
    )
    parser.add_argument(
        "--policy", help="mixed_float16, mixed_bfloat16, ... (default: its own)"
    )
    parser.add_argument(
        "--rows", type=int, default=64, help="rows to use (default: 64)"
    )
    parser.add_argument(
        "--suggest", action="store_true", help="search a policy that is healthy"
    )
    parser.add_argument(
        "--html", type=pathlib.Path, help="write a report to this file"
    )


def _add_advise(added: Any) -> None:
    parser = _add(
        added,
        "advise",
        commands.run_advise,
        "shapes that keep 16-bit hardware waiting, and memory per policy",
        "tfmix advise model.keras --batch-size 128",
        "tfmix advise model.keras --batch-size 128 --json",
    )
    parser.add_argument("model", type=pathlib.Path, help="a .keras file")
    parser.add_argument(
        "--batch-size", type=int, required=True, help="rows of a training batch"
    )


def _add_convert(added: Any) -> None:
    parser = _add(
        added,
        "convert",
        commands.run_convert,
        "a saved model into another policy, weights carried over",
        "tfmix convert model.keras model16.keras --policy mixed_float16",
        "tfmix convert model.keras served.keras --policy bfloat16 --inference",
    )
    parser.add_argument("source", type=pathlib.Path, help="a .keras file")
    parser.add_argument("target", type=pathlib.Path, help="the file to write")
    parser.add_argument(
        "--policy", required=True, help="mixed_float16, bfloat16, O2, ..."
    )
    parser.add_argument(
        "--inference",
        action="store_true",
        help="leave out the optimizer and the loss",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace an existing file"
    )


def _add(
    added: Any,
    name: str,
    command: Callable[[argparse.Namespace], commands.Outcome],
    summary: str,
    *examples: str,
) -> argparse.ArgumentParser:
    lines = "\n".join(f"  {example}" for example in examples)
    parser: argparse.ArgumentParser = added.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=f"examples:\n{lines}\n\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--json", action="store_true", help="print JSON instead of a table"
    )
    parser.set_defaults(command=command)
    return parser
