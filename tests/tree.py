"""The source tree, for tests of what is in it besides `tfmix/`.

A test file that imports this is skipped where there is none: an installed
tfmix is tested as well (`make test-wheel`).
"""

import pathlib

import pytest

ROOT = pathlib.Path(__file__).parent.parent

if not (ROOT / "setup.cfg").is_file():
    pytest.skip("this is about the source tree", allow_module_level=True)
