"""The table of levels in the documentation matches the code."""

from tests.tree import ROOT
from tfmix.policy import float32_layers

PAGE = ROOT / "docs" / "coming-from" / "others.md"


def table():
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    rows = [line.split("|")[1:-1] for line in lines if line.startswith("| `O")]
    return {cells[0].strip(" `"): [c.strip() for c in cells] for cells in rows}


def test_every_level_has_a_row():
    assert set(table()) == set(float32_layers.LEVELS)


def test_rows_match_the_levels():
    for name, cells in table().items():
        level = float32_layers.LEVELS[name]
        assert cells[1].startswith(f"`{level.policy}`")
        statistics = "float16" if name == "O3" else "float32"
        assert cells[3] == statistics
        batchnorm = "BatchNormalization"
        kept = batchnorm in level.layers or level.policy == "float32"
        assert (cells[3] == "float32") == kept
        assert cells[4] == ("default" if level.op_rules else "none")
        mixed = level.policy == "mixed_float16"
        assert cells[5] == ("dynamic" if mixed else "none")


def test_level_one_names_its_white_list_and_level_two_its_black_list():
    rows = table()
    for name in ("Dense", "EinsumDense", "MultiHeadAttention", "PReLU"):
        assert name in float32_layers.MATMUL_LAYERS
        assert f"`{name}`" in rows["O1"][2]
    assert "`LayerNormalization`" in rows["O2"][2]
    assert "LayerNormalization" in float32_layers.LEVELS["O2"].layers
