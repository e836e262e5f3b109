"""Makes the notebooks of examples/notebooks/ from the scripts beside them.

A script has its cells between `# %%` (code) and `# %% [markdown]` lines, as
many editors and jupytext read them. Below its title comes the badge that opens
it in Colab, and a line such as `# %pip install` loses its `# `. Outputs are
left out: a change of the script is the same change of the notebook.

Usage: python .ci/notebooks.py
"""

import hashlib
import json
import pathlib
import re
from typing import Any

FOLDER = pathlib.Path(__file__).parent.parent / "examples" / "notebooks"
# Where the repository is published.
REPOSITORY = "tfmix/tfmix"
COLAB = "https://colab.research.google.com"
_MARKER = re.compile(r"^# %%( \[markdown\])?\n", re.M)
_METADATA = {
    "kernelspec": {
        "display_name": "Python 3",
        "language": "python",
        "name": "python3",
    },
    "language_info": {"name": "python"},
}


def cells(script: str, name: str) -> list[tuple[str, str]]:
    """Returns the kind, "markdown" or "code", and the text of each cell."""
    before, *parts = _MARKER.split(script)
    if before:
        raise ValueError(f"{name} must begin with a cell. Received: {before!r}")
    found = []
    for marked, text in zip(parts[::2], parts[1::2], strict=True):
        if marked:
            text = re.sub(r"^# ?", "", text, flags=re.M)
            if not found:
                title, newline, rest = text.partition("\n")
                text = f"{title}{newline}\n{badge(name)}\n{rest}"
        else:
            text = re.sub(r"^# (?=%)", "", text, flags=re.M)
        found.append(("markdown" if marked else "code", text.strip()))
    return found


def badge(name: str) -> str:
    """Returns the picture that opens a notebook in Colab, as Markdown."""
    address = f"{COLAB}/github/{REPOSITORY}/blob/main/examples/notebooks"
    picture = f"{COLAB}/assets/colab-badge.svg"
    return f"[![Open in Colab]({picture})]({address}/{name}.ipynb)"


def notebook(script: str, name: str) -> str:
    """Returns the notebook of a script, as JSON (nbformat 4.5)."""
    made: dict[str, dict[str, Any]] = {}
    for kind, text in cells(script, name):
        # By the first line, so that a new cell leaves the others' alone.
        digest = hashlib.sha256(text.split("\n")[0].encode()).hexdigest()[:8]
        same = sum(key.startswith(digest) for key in made)
        key = f"{digest}-{same}" if same else digest
        made[key] = {
            "cell_type": kind,
            "id": key,
            "metadata": {},
            "source": text.splitlines(keepends=True),
        }
        if kind == "code":
            made[key] |= {"execution_count": None, "outputs": []}
    content = {
        "cells": list(made.values()),
        "metadata": _METADATA,
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    # As Jupyter writes them.
    written = json.dumps(content, indent=1, ensure_ascii=False, sort_keys=True)
    return written + "\n"


def write() -> None:
    """Writes the notebook of each script beside it."""
    for path in sorted(FOLDER.glob("*.py")):
        made = notebook(path.read_text(encoding="utf-8"), path.stem)
        path.with_suffix(".ipynb").write_text(made, encoding="utf-8")


if __name__ == "__main__":
    write()
