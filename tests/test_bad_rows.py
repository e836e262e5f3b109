"""Rows that hold NaN or infinity, as messages describe them."""

import numpy as np

from tfmix import _bad_rows


def test_a_nest_has_the_rows_of_its_longest_array():
    nest = [np.full((7, 1), np.inf), np.array([[np.nan], [1.0]])]
    (found,) = _bad_rows.find({"x": nest})
    assert found.text == (
        "`x` holds NaN or infinity in 7 of 7 rows (0, 1, 2, ...)"
    )


def test_a_number_beyond_float32_is_bad_without_a_warning(recwarn):
    (found,) = _bad_rows.find({"y": np.array([[1.0], [1e300]])})
    assert found.rows == (1,)
    assert not recwarn
