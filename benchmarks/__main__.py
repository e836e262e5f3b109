"""Runs benchmarks one after the other, each in a process of its own.

    python -m benchmarks [NAME ...] [--save] [--json] [--list] [--page]

Without names it runs all, under each backend they are for; `KERAS_BACKEND`
picks one backend. `make bench` is `python -m benchmarks --save`.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

from benchmarks import catalogue, results

_ROOT = pathlib.Path(__file__).parents[1]


def run(name: str, folder: pathlib.Path | None, quiet: bool) -> list[str]:
    """Runs one benchmark under each of its backends.

    Args:
        name: The benchmark's name.
        folder: Where to keep the results; `None` for nowhere.
        quiet: Whether to hide the tables.

    Returns:
        What failed, as commands.
    """
    failed = []
    for backend, environment in catalogue.commands(name):
        command = [sys.executable, "-m", f"benchmarks.{name}"]
        if folder is not None:
            command.append(f"--save={folder}")
        minutes = catalogue.by_name(name).minutes
        title = " ".join(filter(None, [name, backend]))
        print(f"tfmix: {title}, about {minutes:g} min", file=sys.stderr)
        result = subprocess.run(
            command,
            cwd=_ROOT,
            env={**os.environ, **environment},
            stdout=subprocess.DEVNULL if quiet else None,
            check=False,
        )
        if result.returncode:
            failed.append(f"{title} (exit code {result.returncode})")
    return failed


def main(arguments: list[str] | None = None) -> int:
    """Runs what is asked for; 1 if a benchmark failed."""
    options = _parse(arguments)
    if options.list:
        return _list(options.json)
    if options.page:
        print(results.write_page())
        return 0
    names = options.names or [each.name for each in catalogue.BENCHMARKS]
    with tempfile.TemporaryDirectory() as made:
        folder = pathlib.Path(made) if options.json else options.save
        failed = [f for n in names for f in run(n, folder, options.json)]
        if options.json:
            print(json.dumps(results.saved(folder), indent=1))
            if options.save:
                for record in results.saved(folder):
                    results.save(record, options.save)
    for each in failed:
        print(f"tfmix: failed: {each}", file=sys.stderr)
    return int(bool(failed))


def _list(as_json: bool) -> int:
    if as_json:
        names = [each.name for each in catalogue.BENCHMARKS]
        print(json.dumps(names))
        return 0
    for each in catalogue.BENCHMARKS:
        backends = " and ".join(each.backends)
        print(f"{each.name:14} {each.title} ({backends})")
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__.splitlines()[0]
    )
    known = [each.name for each in catalogue.BENCHMARKS]
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--list", action="store_true", help="print the names")
    parser.add_argument(
        "--page", action="store_true", help="only make the page anew"
    )
    results.add_save(parser)
    options = parser.parse_args(arguments)
    for name in options.names:
        if name not in known:
            parser.error(
                f"there is no benchmark {name!r}. There are: {', '.join(known)}"
            )
    return options


if __name__ == "__main__":
    sys.exit(main())
