"""Budgets: a file or a function that outgrows them holds a second idea."""

import ast
import pathlib

PACKAGE = pathlib.Path(__file__).parent.parent / "tfmix"
FILE_LINES = 300
BODY_LINES = 40


def body_lines(function):
    """Counts the lines of a function's body without its docstring."""
    body = function.body
    if ast.get_docstring(function) is not None:
        body = body[1:]
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


def too_long(package):
    """Names what is over budget, with its size."""
    found = []
    for path in sorted(package.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        name = path.relative_to(package)
        if text.count("\n") > FILE_LINES:
            found.append(f"{name}: {text.count(chr(10))} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if body_lines(node) > BODY_LINES:
                    found.append(f"{name}:{node.name}: {body_lines(node)}")
    return found


def test_files_and_functions_keep_to_their_budgets():
    assert len(list(PACKAGE.rglob("*.py"))) > 3
    assert not too_long(PACKAGE)


def test_a_long_file_and_a_long_function_are_found(tmp_path):
    (tmp_path / "long.py").write_text("x = 1\n" * (FILE_LINES + 1))
    (tmp_path / "fits.py").write_text("x = 1\n" * FILE_LINES)
    body = "    x = 1\n" * BODY_LINES
    (tmp_path / "body.py").write_text(
        f'def fits():\n    """Does\n\n    little.\n    """\n{body}\n'
        f"def grown():\n{body}    x = 2\n"
    )
    assert too_long(tmp_path) == ["body.py:grown: 41", "long.py: 301 lines"]
