"""The command line: parse, call one public function, print, exit code."""

import argparse
import dataclasses
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tfmix.devices import devices, suited_policy

OK, UNHEALTHY, BAD_INPUT = 0, 1, 2

EXIT_CODES = """\
exit codes:
  0  done, nothing to object to
  1  done, and something is unhealthy (the output says what)
  2  the command or its input is wrong (the message says what to change)
"""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a command found: for people, for programs and for the shell.

    Attributes:
        text: A string or anything rich can print.
        data: The same as plain JSON values, for `--json`.
        code: The exit code.
    """

    text: Any
    data: Any
    code: int = OK


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
        >>> main(["devices", "--json"])  # doctest: +ELLIPSIS
        {...}
        0
    """
    options = build_parser().parse_args(arguments)
    try:
        outcome = options.command(options)
    except (ImportError, OSError, TypeError, ValueError) as error:
        print(f"tfmix {options.name}: error: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print(f"tfmix {options.name}: interrupted", file=sys.stderr)
        return 130
    if options.json:
        print(json.dumps(outcome.data, indent=2))
    elif outcome.text is not None:
        _print(outcome.text)
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
    commands = parser.add_subparsers(
        dest="name", metavar="COMMAND", required=True
    )
    _add(
        commands,
        "devices",
        _devices,
        "what the hardware can do, and the policy 'auto' takes here",
        ["tfmix devices", "tfmix devices --json"],
    )
    demo = _add(
        commands,
        "demo",
        _demo,
        "train on real scanned digits under three policies and compare",
        ["tfmix demo", "tfmix demo --epochs 4 --seeds 1"],
    )
    demo.add_argument(
        "--epochs", type=int, default=None, help="passes over the data"
    )
    demo.add_argument("--seeds", type=int, default=None, help="runs per policy")
    demo.add_argument(
        "--out", default="out", help="folder for the plot (default: out)"
    )
    return parser


def _add(
    commands: Any,
    name: str,
    command: Callable[[argparse.Namespace], Outcome],
    summary: str,
    examples: list[str],
) -> argparse.ArgumentParser:
    lines = "\n".join(f"  {example}" for example in examples)
    parser: argparse.ArgumentParser = commands.add_parser(
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


def _devices(options: argparse.Namespace) -> Outcome:
    found = devices()
    name, reason = suited_policy(found)
    table = _table("kind", "name", "capability", "float16", "bfloat16")
    for device in found:
        capability = device.compute_capability
        table.add_row(
            device.kind,
            device.name,
            ".".join(map(str, capability)) if capability else "-",
            "fast" if device.float16 else "not faster",
            "fast" if device.bfloat16 else "not faster",
        )
    table.caption = f"'auto' is '{name}' here: {reason}"
    data = {
        "devices": [dataclasses.asdict(device) for device in found],
        "auto": name,
        "reason": reason,
    }
    return Outcome(table, data)


def _demo(options: argparse.Namespace) -> Outcome:
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


def _table(*columns: str) -> Any:
    from rich import box, table

    return table.Table(*columns, box=box.SIMPLE_HEAD, caption_justify="left")


def _print(text: Any) -> None:
    from rich import console

    console.Console().print(text)
