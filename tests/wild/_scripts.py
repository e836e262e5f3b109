"""The scripts of this folder: the `main` of a file, or a row of `SCRIPTS`."""

import functools
import pathlib
import runpy

import keras

HERE = pathlib.Path(__file__).parent
FILES = [
    path
    for path in sorted(HERE.glob("*.py"))
    if not path.stem.startswith(("_", "test"))
]


@functools.cache
def places():
    """Maps the scripts that this backend can run to their files."""
    other = {"tensorflow": "jax", "jax": "tensorflow"}[keras.backend.backend()]
    found = {}
    for path in FILES:
        source = path.read_text()
        if f"import {other}" in source:
            continue
        if "\nSCRIPTS = {" in source:
            found |= dict.fromkeys(runpy.run_path(str(path))["SCRIPTS"], path)
        else:
            found[path.stem] = path
    return found


def train(script, jit=False):
    """Runs a script from its first line on; returns its losses."""
    made = runpy.run_path(str(places()[script]))
    if "SCRIPTS" in made:
        return made["SCRIPTS"][script](jit)
    return made["main"](jit=jit)
