"""A linear map has its given transpose, and all other derivatives."""

import keras
import pytest

pytestmark = pytest.mark.skipif(
    keras.backend.backend() != "jax", reason="JAX alone has such maps"
)
if keras.backend.backend() == "jax":
    import jax
    from jax import numpy as jnp

    from tfmix._keras import linear_maps


def tripled(factor, vector):
    """Multiplies by a factor; its transpose is three times the right one."""

    def forward(factor, vector):
        return {"mapped": factor * vector[0]}

    def transpose(factor, upstream):
        return [3.0 * factor * upstream["mapped"]]

    like = {"mapped": vector}
    mapped = linear_maps.apply(forward, transpose, factor, [vector], like)
    return mapped["mapped"]


@pytest.mark.parametrize("wrap", ["eager", "jit"])
def test_it_has_the_transpose_it_was_given(wrap):
    function = jax.jit(tripled) if wrap == "jit" else tripled
    assert function(2.0, jnp.array(5.0)) == 10.0
    assert transposed(lambda v: function(2.0, v), jnp.array(5.0)) == 6.0


@pytest.mark.parametrize("wrap", ["eager", "jit"])
def test_it_is_differentiated_by_all_that_it_takes(wrap):
    function = jax.jit(tripled) if wrap == "jit" else tripled
    points = jnp.array(2.0), jnp.array(5.0)
    assert jax.grad(function, (0, 1))(*points) == (5.0, 2.0)
    assert jax.jvp(function, points, points)[1] == 20.0
    assert jax.linearize(function, *points)[1](*points) == 20.0


@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0)])
def test_each_row_of_a_batch_is_mapped_and_pulled_back(axes):
    given = jnp.array([2.0, 3.0]), jnp.array([5.0, 7.0])
    factor, vector = (
        rows if axis == 0 else rows[0]
        for rows, axis in zip(given, axes, strict=True)
    )
    batched = jax.vmap(tripled, axes)
    expected = factor * vector
    assert batched(factor, vector).tolist() == expected.tolist()
    found = transposed(lambda v: batched(factor, v).sum(), vector)
    assert found.sum() == 3.0 * jnp.broadcast_to(factor, (2,)).sum()


def transposed(function, like):
    return jax.linear_transpose(function, like)(1.0)[0]
