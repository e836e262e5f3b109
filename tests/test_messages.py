"""All messages go to absl's log, and one line silences them."""

import ast

import pytest

from tests import processes
from tests.tree import ROOT
from tfmix import _messages

PACKAGE = ROOT / "tfmix"
PROGRAM = """
import keras, tfmix
from absl import logging
from tfmix import _users_code
keras.config.set_dtype_policy("float32")
{line}
logging.warning("of absl")
for _ in range(2):
    tfmix.LossScaleOptimizer(keras.optimizers.SGD(loss_scale_factor=2.0))
    exec(compile("_users_code.warn('of a line')", "train.py", "exec"))
"""


def said_by(line):
    run = processes.python("-c", PROGRAM.format(line=line), check=True)
    return [one for one in run.stderr.splitlines() if "tfmix" in one]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "count", "opening"),
    [
        ("", 3, "WARNING:absl:tfmix: the fixed loss"),
        ("logging.use_absl_handler()", 3, "W"),
        ('logging.set_verbosity("error")', 0, ""),
    ],
)
def test_each_message_is_a_line_in_absls_log(line, count, opening):
    said = said_by(line)
    assert len(said) == count
    for one in said[::2]:
        assert one.startswith(opening)
        assert "tfmix: the fixed loss" in one
        # absl's handler names the line that warned.
        assert "_messages.py" not in one
    assert all("tfmix: of a line (train.py:1)" in one for one in said[1:2])


def test_a_block_is_silenced_around_another_and_a_message_is_said_once(caplog):
    with _messages.silenced():
        with _messages.silenced():
            _messages.warn("not said")
        _messages.warn("nor this")
    _messages.warn("said %d", 1)
    _messages.warn_once("so it is")
    _messages.warn_once("so it is")
    assert caplog.messages == ["tfmix: said 1", "tfmix: so it is"]


def test_no_module_warns_in_another_way():
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom | ast.Import):
                names = {each.name for each in node.names}
                assert "logging" not in names or path.name == "_messages.py"
            is_call = isinstance(node, ast.Call)
            called = ast.unparse(node.func) if is_call else ""
            if called == "warnings.warn":
                # Tools look for this category of Python.
                assert "DeprecationWarning" in ast.unparse(node)
            if called.startswith("_messages."):
                assert "tfmix: " not in ast.unparse(node)


def test_the_guide_silences_them_in_the_same_way():
    page = (ROOT / "docs" / "when-it-goes-wrong.md").read_text()
    assert 'logging.set_verbosity("error")' in page
