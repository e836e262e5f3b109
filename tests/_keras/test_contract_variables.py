"""Variables of Keras and TensorFlow hold their values like this."""

import keras
import pytest

from tests._keras.contracts import (
    jax_only,
    tensorflow_only,
)


@jax_only
def test_a_constant_belongs_to_the_function_that_jax_compiles():
    import jax

    found = []

    def inner(x):
        found.append(jax.numpy.zeros(())._trace)
        return x * 2.0

    @jax.jit
    def outer(x):
        # It is kept alive, because equal addresses would prove nothing.
        found.append(jax.numpy.zeros(())._trace)
        return jax.grad(inner)(x) + jax.vmap(inner)(x[None])[0] + outer_too(x)

    outer_too = jax.jit(inner)
    outer(jax.numpy.ones(()))
    around, differentiated, mapped, compiled = found
    assert around is differentiated is mapped
    assert compiled is not around
    jax.grad(lambda x: found.append(jax.numpy.zeros(())) or x)(1.0)
    assert not isinstance(found[-1], jax.core.Tracer)


@tensorflow_only
@pytest.mark.parametrize("make", [lambda: keras.Variable([1.0]), keras.Layer])
def test_what_tensorflow_tracks_starts_with_self(make, tmp_path):
    import tensorflow as tf

    tracked = make()
    before = set(vars(tracked))
    tf.train.Checkpoint(one=tracked).write(str(tmp_path / "saved"))
    new = set(vars(tracked)) - before
    assert new
    assert all(name.startswith("_self_") for name in new)
