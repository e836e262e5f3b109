"""JAX's products with weights have every derivative, in loops as well."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfmix
from tests import helpers

RNG = np.random.default_rng(1)


def normal(*shape):
    return RNG.normal(size=shape).astype("float32")


@helpers.requires_backend("jax")
def test_products_have_every_derivative():
    import jax
    from jax import numpy as jnp

    from tfmix.ops import contraction, jax_products

    shapes = (2, 3, 4), (5, 4, 3)
    axes = contraction.of_op("einsum", ["abc,dcb->ad"], {}, shapes, 1)
    x = jnp.asarray(normal(2, 3, 4), "float16")
    w = jnp.asarray(normal(5, 4, 3))

    def exact(x, w):
        return jnp.einsum("abc,dcb->ad", x, w)

    def product(x, w):
        return jax_products.contracted(exact, x, w, None, axes)

    def loss(function):
        return lambda x, w: jnp.sum(jnp.sin(function(x, w).astype("float32")))

    def close(found, right):
        error = np.linalg.norm(np.ravel(found - right))
        assert error < 0.004 * np.linalg.norm(np.ravel(right))

    wide = x.astype("float32")
    mine, right = loss(product), loss(exact)
    gradient, expected = (jax.jit(jax.grad(one, 1)) for one in (mine, right))
    close(gradient(x, w), expected(wide, w))
    hessians = (jax.jit(jax.hessian(one, 1)) for one in (mine, right))
    close(*(one(of, w) for one, of in zip(hessians, (x, wide), strict=True)))
    mixed = (jax.jit(jax.jacrev(jax.grad(one), 1)) for one in (mine, right))
    close(*(one(of, w) for one, of in zip(mixed, (x, wide), strict=True)))
    _, push = jax.linearize(lambda w: mine(x, w), w)
    close(push(w), jax.jvp(lambda w: right(wide, w), (w,), (w,))[1])
    xs, ws = jnp.stack([x, 2 * x]), jnp.stack([w, 3 * w], axis=2)
    for places in ((0, 2), (None, 2), (0, None)):
        given = [
            one if place is None else many
            for place, one, many in zip(places, (x, w), (xs, ws), strict=True)
        ]
        close(
            jax.vmap(gradient, places)(*given),
            jax.vmap(expected, places)(given[0].astype("float32"), given[1]),
        )
    rematerialised = jax.checkpoint(mine)
    close(jax.jit(jax.grad(rematerialised, 1))(x, w), expected(wide, w))


@helpers.requires_backend("jax")
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_a_weight_that_is_read_before_a_loop_sums_its_steps_in_float32(policy):
    import jax

    class Rows(layers.Layer):
        def build(self, shape):
            self.kernel = self.add_weight(shape=(4, 4))

        def call(self, x):
            kernel = ops.convert_to_tensor(self.kernel)
            return ops.map(lambda row: ops.matmul(row, kernel), x)

    tfmix.set_global_policy(policy)
    model = keras.Sequential([keras.Input((4,), batch_size=4000), Rows()])
    x = np.ones((4000, 4), "float32")

    def total(weights):
        return model.stateless_call(weights, [], x, training=True)[0].sum()

    (gradient,) = jax.grad(total)([v.value for v in model.trainable_variables])
    assert np.all(gradient == 4000)


@helpers.requires_backend("jax")
@pytest.mark.parametrize("sign", [1, -1])
def test_a_bias_in_a_loops_steps_has_every_derivative(sign):
    import jax

    class Cell(keras.layers.Layer):
        state_size = 4

        def build(self, shape):
            self.kernel = self.add_weight(shape=(shape[-1], 4))
            self.bias = self.add_weight(shape=(4,), initializer="ones")

        def call(self, x, states):
            change = self.bias + sign * ops.matmul(x, self.kernel)
            new = ops.tanh(change + 0.1 * states[0])
            return new, [new]

    x, found = normal(64, 50, 3), []
    for policy in ("float32", "mixed_float16"):
        keras.utils.set_random_seed(0)
        tfmix.set_global_policy(policy)
        model = keras.Sequential(
            [keras.Input((50, 3)), keras.layers.RNN(Cell())]
        )

        def mean(weights, model=model):
            return model.stateless_call(weights, [], x)[0].mean()

        weights = [v.value for v in model.trainable_variables]
        _, along = jax.jvp(mean, (weights,), (weights,))
        found.append([*jax.jit(jax.grad(mean))(weights), along])
    for right, value in zip(*found, strict=True):
        error = np.linalg.norm(np.ravel(value - right))
        assert error < 0.004 * np.linalg.norm(np.ravel(right))
