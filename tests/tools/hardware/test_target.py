"""The names, grids and descriptions of accelerators."""

import pytest

import tfmix
from tests import helpers
from tfmix.policy import devices
from tfmix.tools.hardware import target as targets

pytestmark = pytest.mark.every_case("each row is a separate rule, and fast")


def test_targets_print_as_a_table():
    printed = str(tfmix.hardware.targets())
    (line,) = [one for one in printed.splitlines() if "H200" in one]
    assert line.split()[-4:] == ["989", "989", "1979", "1979"]
    assert " 141 " in line
    assert max(map(len, printed.splitlines())) <= 80
    assert " 141 " in helpers.notebook_html(tfmix.hardware.targets())


@pytest.mark.parametrize(
    "target", tfmix.hardware.targets(), ids=lambda one: one.name
)
def test_rates_agree_with_each_other_with_auto_and_the_devices(target):
    kind, rates = target.kind, target.rates
    fastest = max(rates.get(d, 0) for d in ("float16", "bfloat16"))
    assert fastest >= rates["float32"] > 1e12
    assert 1e11 < target.bandwidth < 1e13
    assert 1e10 < target.memory < 1e12
    assert ("float16" in rates) == (kind == "GPU")
    device = devices.describe(kind, target.title, "jax", target.capability)
    for dtype in ("float16", "bfloat16", "float8"):
        assert getattr(device, dtype) == (dtype in rates)
    fast = "bfloat16" if "bfloat16" in rates else "float16"
    assert target.auto() == f"mixed_{fast}"


@pytest.mark.parametrize(
    ("given", "near"),
    [
        ("v6", "v6e"),
        ("h20", "h200"),
        ("rtx4080", "rtx4090"),
        ("", None),
        (7, None),
    ],
)
def test_another_name_is_refused_with_the_closest(given, near):
    with pytest.raises(ValueError, match="`target` must be one of") as caught:
        targets.find(given)
    assert f"target={given!r}" in str(caught.value)
    assert near is None or str(caught.value).endswith(f"Did you mean {near!r}?")


def test_the_guide_lists_auto_and_its_gain_for_each_gpu():
    from tests.tree import ROOT  # skips where there is no guide

    page = (ROOT / "docs" / "which-policy.md").read_text(encoding="utf-8")
    cells = [line.strip("| ").split(" | ") for line in page.splitlines()]
    rows = {row[1]: row for row in cells if len(row) > 4}
    for target in tfmix.hardware.targets():
        if target.kind == "GPU":
            _, _, size, auto, gain, *more = rows[f"`{target.name}`"]
            assert int(size) == round(target.memory / 2**30)
            assert auto == f"`{target.auto()}`"
            rates = target.rates
            assert gain == f"{rates['float16'] / rates['float32']:.1f}"
            narrow = rates.get("float8", 0) / rates["float32"]
            assert (f"`mixed_float8`: {narrow:.1f}" in more) == bool(narrow)
