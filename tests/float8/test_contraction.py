"""The summed axes of a product are found from an einsum."""

import pytest

from tfmix.float8 import contraction

pytestmark = pytest.mark.every_case("each row is a rule of its own, and fast")


def of_einsum(equation, ranks):
    return contraction.of_einsum(equation, ranks)


@pytest.mark.parametrize(
    ("equation", "ranks", "expected"),
    [
        ("ab,bc->ac", (2, 2), ("ab", "bc", "ac")),
        ("... x, x y -> ... y", (3, 2), ("abx", "xy", "aby")),
        ("abcd,cde->abe", (4, 3), ("abcd", "cde", "abe")),
    ],
)
def test_einsum(equation, ranks, expected):
    found = of_einsum(equation, ranks)
    assert (found.inputs, found.weight, found.outputs) == expected


@pytest.mark.parametrize(
    ("equation", "ranks"),
    [
        ("ab,bc", (2, 2)),
        ("ab,cd->abcd", (2, 2)),
        ("aab,bc->ac", (3, 2)),
        ("abd,bc->ac", (3, 2)),
        ("ab,...c->ac", (2, 2)),
    ],
)
def test_products_that_are_not_of_matrices_are_left_alone(equation, ranks):
    assert of_einsum(equation, ranks) is None


def test_every_letter_has_one_role():
    axes = contraction.Contraction("bmk", "bkn", "bmn")
    assert (axes.batch, axes.free, axes.summed, axes.new) == (
        "b",
        "m",
        "k",
        "n",
    )
