"""The summed axes of a product are found from Keras's arguments."""

import numpy as np
import pytest

from tfmix.ops import contraction

pytestmark = pytest.mark.every_case("each row is a rule of its own, and fast")

RNG = np.random.default_rng(0)


def of_op(name, first, second, weight_at, *arguments):
    shapes = [np.shape(first), np.shape(second)]
    args = [first, second, *arguments]
    return contraction.of_op(name, args, {}, shapes, weight_at)


def of_einsum(equation, ranks):
    shapes = [(2,) * rank for rank in ranks]
    return contraction.of_op("einsum", [equation], {}, shapes, 1)


def by_letters(axes, first, second, weight_at):
    """Computes the product of two factors from the letters."""
    inputs, weight = (first, second) if weight_at else (second, first)
    equation = f"{axes.inputs},{axes.weight}->{axes.outputs}"
    return np.einsum(equation, inputs, weight)


@pytest.mark.parametrize("weight_at", [0, 1])
@pytest.mark.parametrize(
    ("op", "first", "second"),
    [
        (np.matmul, (2, 3), (3, 4)),
        (np.matmul, (3,), (3, 4)),
        (np.matmul, (5, 2, 3), (5, 3, 4)),
        (np.matmul, (6, 5, 2, 3), (5, 3, 4)),
        # It keeps the axes of both factors.
        (np.dot, (2, 3), (3, 4)),
        (np.dot, (3,), (3,)),
        (np.dot, (5, 2, 3), (3,)),
        (np.dot, (6, 2, 3), (5, 3, 4)),
    ],
)
def test_matmul_and_dot(op, first, second, weight_at):
    a, b = RNG.random(first), RNG.random(second)
    axes = of_op(op.__name__, a, b, weight_at)
    np.testing.assert_allclose(by_letters(axes, a, b, weight_at), op(a, b))


def test_a_dot_with_a_number_is_left_alone():
    assert of_op("dot", 1.0, np.ones((2, 2)), 0) is None


@pytest.mark.parametrize(
    ("first", "second", "axes"),
    [
        ((2, 3), (3, 4), 1),
        ((5, 2, 3), (2, 3, 4), 2),
        ((5, 2, 3), (3, 4, 2), ((1, 2), (2, 0))),
        ((2, 3), (4, 3), (1, 1)),
    ],
)
def test_tensordot(first, second, axes):
    a, b = RNG.random(first), RNG.random(second)
    found = of_op("tensordot", a, b, 1, axes)
    np.testing.assert_allclose(
        by_letters(found, a, b, 1), np.tensordot(a, b, axes)
    )


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


def test_stacks_that_are_repeated_are_left_alone():
    a, b = np.ones((2, 2, 2)), np.ones((1, 2, 2))
    assert of_op("matmul", a, b, 1) is None


def test_every_letter_has_one_role():
    axes = contraction.Contraction("bmk", "bkn", "bmn")
    assert (axes.batch, axes.free, axes.summed, axes.new) == (
        "b",
        "m",
        "k",
        "n",
    )
