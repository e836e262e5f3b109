"""The source tree, for tests of files outside of `tfmix/`.

Test files that import this are skipped without a source tree, as for an
installed tfmix (`make test-wheel`).
"""

import pathlib

import pytest

ROOT = pathlib.Path(__file__).parent.parent

if not (ROOT / "setup.cfg").is_file():
    pytest.skip("this is about the source tree", allow_module_level=True)
