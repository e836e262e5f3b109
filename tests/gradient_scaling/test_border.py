"""A border gives unscaled gradients of a float16 function, of any order."""

import keras
import numpy as np
import pytest

ON_JAX = keras.backend.backend() == "jax"
if ON_JAX:
    import jax

    from tfmix.gradient_scaling import jax_border
else:
    import tensorflow as tf

    from tfmix.gradient_scaling import tensorflow_border

MODES = ["eager", "jit"] if ON_JAX else ["eager", "graph", "jit"]
RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 8)).astype("float32")
WEIGHTS = [
    0.3 * RNG.normal(size=(8, 32)).astype("float32"),
    0.2 * RNG.normal(size=(32, 1)).astype("float32"),
]
# This is far below float16's range.
FAINT = 1e-7


def mean(values):
    return keras.ops.mean(keras.ops.square(values))


class Net:
    """Two layers, in float32, or in float16 inside a border."""

    def __init__(self, dtype):
        self._dtype = dtype
        self.weights = WEIGHTS if ON_JAX else [*map(tf.Variable, WEIGHTS)]

    def __call__(self, x, weights):
        if self._dtype == "float32":
            return self._net(x, *weights)[0][0]
        if ON_JAX:
            return jax_border.call(self._net, [x, *weights])[0][0]

        # The variables are read inside, like a model's.
        def net(x):
            return self._net(x, *self.weights)

        return tensorflow_border.call(net, [x])[0][0]

    def _net(self, x, *weights):
        first, second = (keras.ops.cast(w, self._dtype) for w in weights)
        x = keras.ops.cast(x, self._dtype)
        hidden = keras.ops.softplus(keras.ops.matmul(x, first))
        result = keras.ops.matmul(hidden, second)
        return [keras.ops.cast(result, "float32")], [], None

    def gradients(self, loss):
        """Returns the gradients of a loss of the net and its weights."""
        if ON_JAX:
            return jax.grad(lambda weights: loss(self, weights))(self.weights)
        with tf.GradientTape() as tape:
            value = loss(self, self.weights)
        return tape.gradient(value, self.weights)

    def inner_gradients(self, loss, x):
        """Returns the gradient of a loss by the input, for further use."""
        if ON_JAX:
            return jax.grad(loss)(x)
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = loss(x)
        return tape.gradient(value, x)


def of_a_mean(net, weights):
    return mean(net(tensor(X), weights)) * FAINT


def of_two_in_a_row(net, weights):
    x = tensor(X)
    return mean(net(x * net(x, weights), weights)) * FAINT


def of_a_penalty_on_a_gradient_of_inputs(net, weights):
    slope = net.inner_gradients(
        lambda x: keras.ops.sum(net(x, weights)), tensor(X)
    )
    norms = keras.ops.sqrt(keras.ops.sum(slope**2, axis=1))
    return mean(norms - 1.0) * FAINT


def of_a_penalty_on_a_gradient_of_weights(net, weights):
    if ON_JAX:
        found = jax.grad(lambda weights: of_a_mean(net, weights))(weights)
    else:
        with tf.GradientTape() as tape:
            value = of_a_mean(net, weights)
        found = tape.gradient(value, weights)
    return sum(keras.ops.sum((g / FAINT) ** 2) for g in found) * FAINT


LOSSES = [
    of_a_mean,
    of_two_in_a_row,
    of_a_penalty_on_a_gradient_of_inputs,
    of_a_penalty_on_a_gradient_of_weights,
]


def tensor(value):
    return keras.ops.convert_to_tensor(value)


def in_mode(function, mode):
    if mode == "eager":
        return function()
    if ON_JAX:
        return jax.jit(function)()
    return tf.function(function, jit_compile=mode == "jit")()


def distance(found, exact):
    """Returns the largest error of several gradients, relative to each."""
    pairs = zip(found, exact, strict=True)
    return max(
        np.linalg.norm(np.asarray(one) - np.asarray(other))
        / np.linalg.norm(np.asarray(other))
        for one, other in pairs
    )


@pytest.mark.costly
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_faint_gradients_are_those_of_float32(loss, mode):
    inside, plain = Net("float16"), Net("float32")
    found = in_mode(lambda: inside.gradients(loss), mode)
    exact = in_mode(lambda: plain.gradients(loss), mode)
    assert distance(found, exact) < 0.005


@pytest.mark.costly
def test_without_a_border_they_are_not():
    bare, plain = Net("float16"), Net("float32")
    bare.__class__ = type(
        "Bare", (Net,), {"__call__": lambda self, x, w: self._net(x, *w)[0][0]}
    )
    found, exact = bare.gradients(of_a_mean), plain.gradients(of_a_mean)
    assert distance(found, exact) > 0.1


@pytest.mark.costly
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("factor", [2.0**-60, 2.0**15, 2.0**60])
def test_it_gives_back_every_factor_from_outside(factor, mode):
    net = Net("float16")

    def times(net, weights):
        return of_a_mean(net, weights) * factor

    once = in_mode(lambda: net.gradients(of_a_mean), mode)
    found = in_mode(lambda: net.gradients(times), mode)
    for one, other in zip(found, once, strict=True):
        np.testing.assert_array_equal(
            np.asarray(one), np.asarray(other) * np.float32(factor)
        )


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_numbers_that_are_not_finite_stay_so(bad):
    net = Net("float16")
    found = net.gradients(lambda net, w: of_a_mean(net, w) * bad)
    assert not any(np.isfinite(np.asarray(each)).any() for each in found)


@pytest.mark.skipif(ON_JAX, reason="JAX has no sparse gradients")
@pytest.mark.parametrize("mode", MODES)
def test_rows_of_a_table_stay_sparse(mode):
    if ON_JAX:
        return
    table = tf.Variable(RNG.normal(size=(50, 4)).astype("float32"))

    def looked_up():
        found = tf.gather(tf.cast(table, "float16"), [3, 3, 7])
        return [tf.cast(found, "float32")], [], None

    def rows():
        with tf.GradientTape() as tape:
            (found,), *_ = tensorflow_border.call(looked_up, [])
            loss = tf.reduce_sum(found) * FAINT
        return tape.gradient(loss, table)

    found = in_mode(rows, mode)
    assert isinstance(found, tf.IndexedSlices)
    np.testing.assert_allclose(found.values, FAINT, rtol=2.0**-11)


@pytest.mark.skipif(ON_JAX, reason="JAX refuses it itself")
def test_the_gradient_of_a_nested_function_can_be_had_once_more():
    net, plain = Net("float16"), Net("float32")
    nested = tf.function(lambda x: net(x, net.weights))

    def loss(_, weights):
        with tf.GradientTape() as tape:
            value = mean(nested(tensor(X)))
        return sum(tf.reduce_sum(g**2) for g in tape.gradient(value, weights))

    def plain_loss(plain, weights):
        with tf.GradientTape() as tape:
            value = mean(plain(tensor(X), weights))
        return sum(tf.reduce_sum(g**2) for g in tape.gradient(value, weights))

    found = in_mode(lambda: net.gradients(loss), "graph")
    exact = in_mode(lambda: plain.gradients(plain_loss), "graph")
    # It is exact, but not scaled.
    assert distance(found, exact) < 0.01


def loss_of(dtype):
    """Returns a loss as a function of one matrix of weights."""
    net = Net(dtype)
    return lambda first: of_a_mean(net, [first, WEIGHTS[1]]) / FAINT


def at_two_points(function):
    return lambda first: jax.vmap(function)(keras.ops.stack([first, first]))


def in_a_loop(loss):
    def looped(first):
        def add(total, _):
            return total + loss(first), None

        return jax.lax.scan(add, 0.0, None, length=2)[0]

    return looped


def along(loss, first):
    return jax.linearize(loss, first)[1](first)


# Maps a loss and a point to a function for forward mode.
FORWARDS = {
    "jvp_of_jit": lambda loss, w: jax.jvp(jax.jit(loss), (w,), (w,))[1],
    "jvp_of_scan": lambda loss, w: jax.jvp(in_a_loop(loss), (w,), (w,))[1],
    "jvp_of_checkpoint": lambda loss, w: jax.jvp(
        jax.checkpoint(loss), (w,), (w,)
    )[1],
    "jvp_of_jit_of_grad": lambda loss, w: jax.jvp(
        jax.jit(jax.grad(loss)), (w,), (w,)
    )[1],
    "linearize": along,
    "linearize_of_jit": lambda loss, w: along(jax.jit(loss), w),
    "linearize_of_grad": lambda loss, w: along(jax.grad(loss), w),
    "linearize_of_vmap": lambda loss, w: along(at_two_points(loss), w),
    "vmap_of_linearize": lambda loss, w: at_two_points(
        lambda w: along(loss, w)
    )(w),
    "grad_of_linearize": lambda loss, w: jax.grad(lambda w: along(loss, w))(w),
    "linearize_of_linearize": lambda loss, w: along(
        lambda w: along(loss, w), w
    ),
    "transpose_of_linearize": lambda loss, w: jax.linear_transpose(
        jax.linearize(loss, w)[1], w
    )(1.0)[0],
    "vmap_of_the_linear_function": lambda loss, w: jax.vmap(
        jax.linearize(loss, w)[1]
    )(keras.ops.stack([w, 2 * w])),
}


@pytest.mark.costly
@pytest.mark.skipif(not ON_JAX, reason="only JAX has them")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FORWARDS)
def test_jaxs_forward_mode_gives_the_derivatives_of_float32(name, mode):
    first = tensor(WEIGHTS[0])

    def by(dtype):
        return lambda: FORWARDS[name](loss_of(dtype), first)

    found, exact = in_mode(by("float16"), mode), in_mode(by("float32"), mode)
    assert distance([found], [exact]) < 0.01


@pytest.mark.skipif(not ON_JAX, reason="only JAX transposes")
def test_the_transpose_of_a_linearized_loss_is_scaled():
    first = tensor(WEIGHTS[0])

    def by(dtype):
        _, linear = jax.linearize(loss_of(dtype), first)
        return jax.linear_transpose(linear, first)(FAINT)[0]

    assert distance([by("float16")], [by("float32")]) < 0.005
