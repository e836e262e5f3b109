"""Puts each fault into a copy of the tree and runs the quick tests there.

    python -m tests.mutations            all faults
    python -m tests.mutations backoff    faults whose name contains the word

If no test notices a fault, it is reported as green and the exit status is 1.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

from tests.mutations import catalogue
from tests.tree import ROOT

BACKENDS = ("tensorflow", "jax")
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv*", ".*_cache", "__pycache__", "build", "dist", "out", "site"
)
# pytest's exit codes: all tests passed; a test failed, or stopped the run.
GREEN, RED = 0, (1, 2)


def run(tree, backend, *arguments):
    """Runs the quick tests; returns pytest's status and output."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *arguments],
        cwd=tree,
        env=os.environ | {"KERAS_BACKEND": backend},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode not in (GREEN, *RED):
        raise RuntimeError(
            f"pytest ended with {done.returncode}.\n{done.stdout}"
        )
    return done.returncode, done.stdout


def noticed_by(tree, fault):
    """Returns the first test that fails, "" if none does."""
    status, text = run(tree, fault.backend, "-x", *fault.tests)
    for backend in BACKENDS:
        if status == GREEN:
            status, text = run(tree, backend, "-x", "-n2", "--dist=worksteal")
    if status == GREEN:
        return ""
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", text, re.M)
    return found[1] if found else text.splitlines()[-1]


def check_unbroken(tree, faults):
    """Raises an error if the tests for the faults fail without a fault."""
    for backend in BACKENDS:
        files = {
            file
            for fault in faults
            for file in fault.tests
            if fault.backend == backend
        }
        if files and (done := run(tree, backend, *sorted(files)))[0] != GREEN:
            raise RuntimeError(f"Tests fail without a fault.\n{done[1]}")


def main(word=""):
    """Reports which faults are noticed; returns the exit status."""
    faults = [one for one in catalogue.faults() if word in one.name]
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = pathlib.Path(folder, "tree")
        shutil.copytree(ROOT, tree, ignore=LEFT_OUT)
        check_unbroken(tree, faults)
        for fault in faults:
            shutil.rmtree(tree / "tfmix")
            shutil.copytree(ROOT / "tfmix", tree / "tfmix", ignore=LEFT_OUT)
            fault.apply(tree)
            start = time.monotonic()
            test = noticed_by(tree, fault)
            missed += not test
            seconds = time.monotonic() - start
            outcome = "red" if test else "GREEN"
            print(
                f"{outcome:5} {seconds:4.0f} s  {fault.name}: {test}",
                flush=True,
            )
    print(f"{len(faults) - missed} of {len(faults)} faults are noticed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
