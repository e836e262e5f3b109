"""Masters notice which 16-bit weights were assigned; NaN keeps its meaning."""

import numpy as np
import pytest
from keras import ops

from tfmix.optimizers import bits


@pytest.mark.parametrize("nan", [0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000])
def test_a_nan_stays_a_nan_in_the_upper_half(nan):
    value = ops.convert_to_tensor(np.array([nan], "uint32").view("float32"))
    word = ops.convert_to_numpy(bits.quiet(value)).view("uint32")
    upper = (word & 0xFFFF0000).view("float32")
    assert np.isnan(upper[0])


@pytest.mark.costly
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_master_changes_only_where_its_weight_was_assigned(dtype):
    master = ops.convert_to_tensor(np.array([1.0001, 1.0001], "float32"))
    stored = ops.cast(np.array([1.0, 3.0], "float32"), dtype)
    found = ops.convert_to_numpy(bits.refresh_master(master, stored))
    np.testing.assert_array_equal(found, np.array([1.0001, 3.0], "float32"))
