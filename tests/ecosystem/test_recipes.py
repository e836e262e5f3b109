"""The guide's code that needs other packages runs unchanged."""

import pytest

from tests import helpers
from tests.project import test_docs

pytest.importorskip("keras_hub")
pytestmark = helpers.requires_backend("tensorflow")
PAGE = test_docs.DOCS / "recipes" / "adapters-remat-export.md"


# These are warnings of Keras and of attention layers.
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_every_block_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text(encoding="utf-8").replace("```py\n", "```python\n")
    names = test_docs.run_page(text, str(PAGE))
    adapters = names["backbone"].trainable_variables
    assert any("lora" in v.path for v in adapters)
    assert all(v.dtype == "float32" for v in adapters)
