"""Makes the notebooks of examples/notebooks/ from the scripts beside them.

A script has its cells between `# %%` (code) and `# %% [markdown]` lines, as
many editors and jupytext read them. Below its title comes the badge that opens
it in Colab, once the repository is published, and a line such as
`# %pip install` loses its `# `. `start` is run, so that who reads it sees what
it shows; of the others a change of the script is the same of the notebook.

Usage: python .ci/notebooks.py
"""

import ast
import contextlib
import hashlib
import io
import json
import pathlib
import re
from typing import Any

FOLDER = pathlib.Path(__file__).parent.parent / "examples" / "notebooks"
# Where the repository is published, as "owner/name"; "" where it is not.
REPOSITORY = ""
# Those with outputs.
RUN = ("start",)
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
                opens = [f"\n{badge(name)}\n"] * bool(REPOSITORY)
                text = "".join([title, newline, *opens, rest])
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


def with_outputs(made: str) -> str:
    """Runs a notebook's cells and returns it with what they print and show."""
    content = json.loads(made)
    names: dict[str, Any] = {}
    for cell in content["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code" and not source.startswith("%"):
            cell["outputs"] = _outputs(source, names)
    written = json.dumps(content, indent=1, ensure_ascii=False, sort_keys=True)
    return written + "\n"


def _outputs(source: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    lines = ast.parse(source).body
    last = lines.pop() if isinstance(lines[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(ast.Module(lines, []), "cell", "exec"), names)
        value = None
        if last is not None:
            code = compile(ast.Expression(last.value), "cell", "eval")
            value = eval(code, names)
    found: list[dict[str, Any]] = []
    # What a line drew over itself is not kept.
    text = re.sub(r"[^\n]*[\r\b]+", "", printed.getvalue())
    if text:
        stream = {"output_type": "stream", "name": "stdout"}
        found.append(stream | {"text": text.splitlines(keepends=True)})
    if value is not None:
        data = {"text/plain": repr(value).splitlines(keepends=True)}
        if hasattr(value, "_repr_mimebundle_"):
            page = value._repr_mimebundle_([], [])["text/html"]
            data["text/html"] = page.splitlines(keepends=True)
        elif hasattr(value, "_repr_html_"):
            page = value._repr_html_()
            data["text/html"] = page.splitlines(keepends=True)
        shown = {"output_type": "display_data", "metadata": {}}
        found.append(shown | {"data": data})
    return found


def write() -> None:
    """Writes the notebook of each script beside it."""
    for path in sorted(FOLDER.glob("*.py")):
        made = notebook(path.read_text(encoding="utf-8"), path.stem)
        if path.stem in RUN:
            made = with_outputs(made)
        path.with_suffix(".ipynb").write_text(made, encoding="utf-8")


if __name__ == "__main__":
    write()
