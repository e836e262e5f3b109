"""Runs benchmarks one after the other, each in its own process.

    python -m benchmarks [NAME ...] [--save=docs] [--json] [--list] [--page]

Without names it runs all benchmarks, under each of their backends;
`KERAS_BACKEND` chooses one backend. `make bench` is `python -m benchmarks
--save=docs`.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

from absl import app, flags, logging

from benchmarks import catalogue, results

_ROOT = pathlib.Path(__file__).parents[1]


def run(name: str, folder: pathlib.Path | None, quiet: bool) -> list[str]:
    """Runs one benchmark under each of its backends.

    Args:
        name: The benchmark's name.
        folder: Where to keep the results; `None` to discard them.
        quiet: Whether to hide the tables.

    Returns:
        The failed commands.
    """
    failed = []
    for backend, environment in catalogue.commands(name):
        command = [sys.executable, "-m", f"benchmarks.{name}"]
        if folder is not None:
            command.append(f"--save={folder}")
        title = f"{name} {backend}"
        logging.info(title)
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


FLAGS = results.flag_values()
flags.DEFINE_bool("list", False, "print the names", flag_values=FLAGS)
flags.DEFINE_bool("page", False, "only make the page anew", flag_values=FLAGS)


def main(arguments: list[str] | None = None) -> int:
    """Runs the chosen benchmarks; returns 1 if one failed."""
    words = sys.argv[1:] if arguments is None else arguments
    chosen = results.parse(FLAGS, words)
    known = [each.name for each in catalogue.BENCHMARKS]
    for name in chosen:
        if name not in known:
            raise app.UsageError(
                f"there is no benchmark {name!r}. There are: {', '.join(known)}"
            )
    if FLAGS.list and FLAGS.json:
        print(json.dumps(known))
        return 0
    if FLAGS.list:
        for each in catalogue.BENCHMARKS:
            backends = " and ".join(each.backends)
            print(f"{each.name:14} {each.title} ({backends})")
        return 0
    if FLAGS.page:
        print(results.write_page())
        return 0
    names = chosen or known
    save = pathlib.Path(FLAGS.save) if FLAGS.save else None
    with tempfile.TemporaryDirectory() as made:
        folder = pathlib.Path(made) if FLAGS.json else save
        failed = [f for n in names for f in run(n, folder, FLAGS.json)]
        if FLAGS.json:
            print(json.dumps(results.saved(folder), indent=1))
            if save:
                for record in results.saved(folder):
                    results.save(record, save)
    for each in failed:
        logging.error("failed: %s", each)
    return int(bool(failed))


if __name__ == "__main__":
    results.start(main, FLAGS)
