"""The summed axes of a product are found from an einsum."""

import pytest

from tfmix.float8 import contraction

pytestmark = pytest.mark.every_case("each row is a rule of its own, and fast")


@pytest.mark.parametrize(
    ("equation", "ranks", "expected"),
    [
        ("ab,bc->ac", (2, 2), ("ab", "bc", "ac", "a", "b", "c")),
        ("... x, x y -> ... y", (3, 2), ("abx", "xy", "aby", "ab", "x", "y")),
        ("abcd,dce->abe", (4, 3), ("abcd", "dce", "abe", "ab", "dc", "e")),
    ],
)
def test_einsum(equation, ranks, expected):
    assert contraction.of_einsum(equation, ranks) == expected


@pytest.mark.parametrize(
    ("equation", "ranks"),
    [
        ("ab,bc", (2, 2)),
        ("ab,cd->abcd", (2, 2)),
        ("aab,bc->ac", (3, 2)),
        ("abd,bc->ac", (3, 2)),
        ("ab,...c->ac", (2, 2)),
        ("bmk,bkn->bmn", (3, 3)),
    ],
)
def test_products_that_are_not_of_matrices_are_left_alone(equation, ranks):
    assert contraction.of_einsum(equation, ranks) is None
