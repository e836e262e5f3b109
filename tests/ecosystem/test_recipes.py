"""The guide's code that needs KerasHub runs as it is written."""

import re

import pytest

from tests import helpers, test_docs

pytest.importorskip("keras_hub")
pytestmark = helpers.requires_backend("tensorflow")
PAGE = test_docs.DOCS / "recipes" / "adapters-remat-export.md"


def test_a_backbone_is_fine_tuned_with_adapters():
    text = PAGE.read_text(encoding="utf-8")
    (block,) = re.findall(r"^```py\n(.*?)^```$", text, re.M | re.S)
    names = test_docs.start()
    names["ids"] = ids = names["np"].ones((32, 8), "int32")
    names["odd"] = ids[:, :1] % 2
    exec(compile(block, str(PAGE), "exec"), names)
    adapters = [v for v in names["backbone"].trainable_variables]
    assert any("lora" in v.path for v in adapters)
    assert all(v.dtype == "float32" for v in adapters)
