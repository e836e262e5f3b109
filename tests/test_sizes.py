"""A budget for functions: one that outgrows it does a second thing."""

import ast

from tests.tree import ROOT

PACKAGE = ROOT / "tfmix"
BODY_LINES = 40


def body_lines(function):
    """Counts the lines of a function's body without its docstring."""
    body = function.body
    if ast.get_docstring(function) is not None:
        body = body[1:]
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


def too_long(package):
    """Names the functions over budget, with their size."""
    return [
        f"{path.relative_to(package)}:{node.name}: {body_lines(node)}"
        for path in sorted(package.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and body_lines(node) > BODY_LINES
    ]


def test_functions_keep_to_their_budget():
    assert len(list(PACKAGE.rglob("*.py"))) > 3
    assert not too_long(PACKAGE)


def test_a_long_function_is_found(tmp_path):
    body = "    x = 1\n" * BODY_LINES
    (tmp_path / "body.py").write_text(
        f'def fits():\n    """Does\n\n    little.\n    """\n{body}\n'
        f"def grown():\n{body}    x = 2\n"
    )
    assert too_long(tmp_path) == ["body.py:grown: 41"]
