"""Runs Keras's tests under tfmix's policy, and what fails under Keras's, too.

    python -m tests.keras_suite                        all folders, hours
    python -m tests.keras_suite optimizers layers/core
    python -m tests.keras_suite --policy=mixed_bfloat16 optimizers

Many tests fail under either, because they expect the digits of float32. The
exit status is 1 if one that fails under tfmix's policy passes under Keras's or
fails there with another error, unless `known.py` gives the reason.
"""

import argparse
import concurrent.futures
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile

from tests.keras_suite import comparison, known
from tests.tree import ROOT

# pytest's exit codes: all tests passed; some failed; there are none.
RAN = (0, 1, 5)
# Seconds for a folder under one policy, so that a test that hangs is an error.
LIMIT = 7200


def keras_source():
    """Returns the folder `keras/src`, and imports nothing."""
    (folder,) = importlib.util.find_spec("keras").submodule_search_locations
    return pathlib.Path(folder) / "src"


def folders_with_tests(source):
    """Returns the names of the folders of `keras/src` that hold tests."""
    files = source.glob("*/**/*_test.py")
    return sorted({file.relative_to(source).parts[0] for file in files})


def run(source, tests, system, policy):
    """Runs files, folders or single tests; returns the `Result` of each test.

    Args:
        source: The folder `keras/src`.
        tests: What to run, by pytest's names below `source`.
        system: Whose policy it is: `keras` or `tfmix`.
        policy: Its name.
    """
    with tempfile.TemporaryDirectory() as kept:
        out = pathlib.Path(kept) / "outcomes"
        out.touch()
        command = [sys.executable, "-m", "pytest", "-q", "-p"]
        command += ["tests.keras_suite.plugin", "-p", "no:cacheprovider"]
        # The settings of our own tests do not hold for Keras's.
        command += [f"-c{os.devnull}", f"--rootdir={source}"]
        # A file that cannot be imported is a failure like any other.
        command += ["--continue-on-collection-errors"]
        command += ["--import-mode=importlib"]
        command += [str(source / test) for test in tests]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ
            | {
                "KERAS_SUITE": f"{system}:{policy}",
                "KERAS_SUITE_OUT": str(out),
                "PYTHONPATH": str(ROOT),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT,
        )
        lines = [*map(json.loads, out.read_text("utf-8").splitlines())]
    if done.returncode not in RAN:
        raise RuntimeError(
            f"pytest ended with {done.returncode} for {tests} under "
            f"{system}'s {policy}.\n{done.stdout[-4000:]}"
        )
    return comparison.results(lines)


def compared(source, folder, policy):
    """Runs a folder under tfmix's policy, and what fails under Keras's."""
    tfmix = run(source, [folder], "tfmix", policy)
    failing = comparison.not_passed(tfmix)
    keras = run(source, failing, "keras", policy) if failing else {}
    return comparison.compare(keras, tfmix, known.REASONS)


def main():
    source = keras_source()
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folders", nargs="*", help="of keras/src; default: all")
    parser.add_argument("--policy", default="mixed_float16")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args()
    folders = options.folders or folders_with_tests(source)
    for folder in folders:
        if not (source / folder).exists():
            parser.error(f"{source} has no {folder!r}: write one of its paths")
    backend = os.environ.get("KERAS_BACKEND", "tensorflow")
    failed = False
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        runs = [
            pool.submit(compared, source, folder, options.policy)
            for folder in folders
        ]
        for folder, one in zip(folders, runs, strict=True):
            try:
                found = one.result()
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                print(error, flush=True)
                failed = True
                continue
            title = f"{folder}, {backend}, {options.policy}"
            print(comparison.table(title, found), flush=True)
            failed = failed or bool(found.new) or not found.count
    sys.exit(failed)


if __name__ == "__main__":
    main()
