"""An op looks once at what came, and hands through what it has no part in."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfmix
from tests import helpers, steps
from tests.ops import against_float32
from tfmix._keras import op_places

RNG = np.random.default_rng(0)
ROWS = RNG.uniform(3, 6, (20_000, 4)).astype("float32")
ONE_ROW = np.zeros(15_000, "int32")
GAINS = RNG.uniform(0.5, 2, 4).astype("float32")
ONES = np.ones(4, "float32")
ZEROS = np.zeros(20_000, "int32")


SHARED = {
    "a function of it": lambda x, w: x * ops.exp(w),
    "a bound": lambda x, w: ops.minimum(x, w),
    "times an input": lambda x, w: x * (w * ops.mean(x)),
    "plus an input": lambda x, w: x + (w + ops.mean(x, 0)),
    "taken": lambda x, w: x * ops.take(w, [0, 1, 1, 0]),
    "taken often": lambda x, w: x * ops.take(w[None], ZEROS, axis=0),
    "in three factors": lambda x, w: ops.einsum("ni,i,i->n", x, w, w),
    "in a branch": lambda x, w: ops.cond(
        ops.sum(x) > 0, lambda: x * w, lambda: x
    ),
    "in a map": lambda x, w: ops.vectorized_map(lambda r: r * w, x),
    "taken in a map": lambda x, w: ops.vectorized_map(
        lambda r: r * ops.take(w, [0, 1, 1, 0]), x
    ),
    "from a map": lambda x, w: x * ops.vectorized_map(ops.square, 2 * w),
}


@pytest.mark.parametrize("mode", steps.MODES)
@pytest.mark.parametrize("policy", against_float32.WITHIN)
@pytest.mark.parametrize("use", SHARED)
def test_a_weight_shared_by_many_rows_gets_the_sum_of_float32(
    use, policy, mode
):
    against_float32.check(SHARED[use], ROWS, GAINS, policy, mode)


@pytest.mark.parametrize("of_weight", [ops.exp, ops.square, ops.abs, ops.sum])
def test_an_activation_times_what_is_made_of_weights_is_16_bit(of_weight):
    seen = []

    def product(x, w):
        y = ops.relu(x)
        seen.append(y * of_weight(w))
        return seen[-1]

    against_float32.results("mixed_float16", product, ROWS[:3], GAINS)
    assert helpers.dtype_of(seen[-1]) == "float16"


@pytest.mark.parametrize("mode", steps.MODES)
def test_what_is_made_of_weights_alone_may_be_beyond_16_bit(mode):
    def exponential(x, w):
        return x * (ops.exp(8 * w) * 1e-5)

    against_float32.check(exponential, ROWS[:3], GAINS, mode=mode)


@pytest.mark.parametrize("mode", steps.MODES)
@pytest.mark.parametrize(
    "product",
    [
        lambda x, w: ops.einsum("bth,th->b", x, w),
        lambda x, w: ops.einsum("bth,th->b", w[None], x[0]),
        lambda x, w: ops.tensordot(x, w, 2),
    ],
)
def test_a_weight_whose_axes_are_all_summed_gets_a_gradient_of_its_shape(
    product, mode
):
    x = RNG.normal(size=(5, 3, 4)).astype("float32")
    against_float32.check(product, x, x[0], mode=mode)


@pytest.mark.parametrize("mode", steps.MODES)
@pytest.mark.parametrize(
    "repeat",
    [
        lambda x: ops.broadcast_to(x, (5000, 3, 4)),
        lambda x: ops.repeat(x, 5000, axis=0),
        lambda x: ops.tile(x, (5000, 1)),
        lambda x: ops.take(x, np.arange(15_000) % 3, axis=0),
        lambda x: ops.take(ops.relu(x), ONE_ROW, axis=0),
        lambda x: op_places.backend.numpy.take(indices=ONE_ROW, x=x, axis=0),
        lambda x: ops.relu(x)[ONE_ROW if helpers.ON_JAX else 0],
        # XLA takes TensorFlow's gradient for float32.
        lambda x: ops.image.resize(ops.sin(x)[None, :, None], (900, 2)),
        lambda x: x[:1] * ops.ones((15_000, 4), x.dtype),
        lambda x: ops.maximum(x[0], ops.zeros((15_000, 4), x.dtype)),
    ],
)
def test_an_input_that_is_repeated_gets_the_sum_of_float32(repeat, mode):
    def repeated(x, w):
        return w * repeat(x)

    against_float32.check(repeated, ROWS[:3], GAINS, mode=mode)


@pytest.mark.parametrize("mode", steps.MODES)
def test_a_vector_times_a_matrix_has_both_gradients(mode):
    vector, matrix = GAINS, ROWS[:4]
    against_float32.check(ops.matmul, vector, matrix, mode=mode)


LONG = RNG.uniform(0.3, 2, (20_000, 4)).astype("float32")
IN_ONE_ROW = np.zeros((1000, 1), "int32")
REDUCTIONS = {
    "logsumexp": (lambda t: ops.logsumexp(t, axis=0), 8000),
    "an index alone": (lambda t: ops.einsum("ni->i", t) / 1000, 20_000),
    "indices alone": (lambda t: ops.einsum("ni,mi->i", t, t) / 1e4, 200),
    "nanmean": (lambda t: ops.nanmean(t, axis=0), 20_000),
    "nansum": (lambda t: ops.nansum(t, axis=0) / 1000, 20_000),
    "nanvar": (lambda t: ops.nanvar(t, axis=0), 20_000),
    "nanstd": (lambda t: ops.nanstd(t, axis=0), 20_000),
    "moments": (lambda t: ops.moments(t, 0)[1], 20_000),
    "scatter": (
        lambda t: ops.scatter(IN_ONE_ROW, t, (3, 4))[0] / 100,
        1000,
    ),
    "segment_sum": (
        lambda t: ops.segment_sum(t, IN_ONE_ROW[:, 0], 3)[0] / 100,
        1000,
    ),
    "a mean by hand": (lambda t: ops.sum(t, 0) / t.shape[0], 20_000),
}


@pytest.mark.parametrize("mode", steps.MODES)
@pytest.mark.parametrize("policy", against_float32.WITHIN)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_reduction_of_many_rows_sums_in_float32(name, policy, mode):
    function, rows = REDUCTIONS[name]
    if not hasattr(ops, name) and name.startswith("nan"):
        pytest.skip("this Keras has no such op")
    x = LONG[:rows]
    against_float32.check(lambda x, w: function(x * w), x, ONES, policy, mode)


class Calls(layers.Layer):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def build(self, shape):
        self.w = self.add_weight(shape=(1, 5, 5), initializer="ones")

    def call(self, x):
        return self.function(self, x)


BESIDE = {
    "added": lambda layer, x: x[:, :, None] + ops.zeros((1, 5, 5), x.dtype),
    "multiplied": lambda layer, x: x[:, :, None] * ops.ones((1, 5, 5), x.dtype),
    "a weight": lambda layer, x: x[:, :, None] + layer.w,
    "by pairs": lambda layer, x: x[:, :, None] - x[:, None, :],
    "a bias": lambda layer, x: x + ops.ones((5,), x.dtype),
    "a table": lambda layer, x: ops.relu(x) + ops.ones((1, 5), x.dtype),
    "a mask": lambda layer, x: x * ops.ones((1, 5), x.dtype)[:, :1],
}


@pytest.mark.parametrize("name", BESIDE)
def test_a_layer_of_an_unknown_batch_stays_in_16_bit(name, caplog):
    tfmix.set_global_policy("mixed_float16")
    layer = Calls(BESIDE[name])
    layer(keras.Input((5,)))
    assert layer.compute_dtype == "float16"
    assert not caplog.text


WITHOUT_KERNELS = {
    "rfft": lambda t: ops.rfft(t)[0],
    "lu": lambda t: ops.lu_factor(t)[0],
    "erfinv": lambda t: ops.erfinv(t / 100),
    "cholesky": lambda t: ops.cholesky(t * 0 + ops.eye(8)),
}


@pytest.mark.parametrize("policy", against_float32.WITHIN)
@pytest.mark.parametrize("name", WITHOUT_KERNELS)
def test_an_op_without_a_16_bit_kernel_is_a_node_of_a_model(name, policy):
    op, results = WITHOUT_KERNELS[name], []
    for each in ("float32", policy):
        tfmix.set_global_policy(each)
        inputs = keras.Input((8,), batch_size=8)
        dense = layers.Dense(8, kernel_initializer="identity")
        model = keras.Model(inputs, op(dense(inputs)))
        results.append(helpers.to_numpy(model(np.eye(8) + 0.25)))
    np.testing.assert_allclose(*results, atol=1e-2)


# TensorFlow draws in the dtype of the inputs: 128 numbers in bfloat16.
# JAX drops the same numbers as in float32.
@helpers.requires_backend("tensorflow")
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("rate", [0.3, 0.01])
def test_dropout_keeps_the_mean(rate, policy):
    with tfmix.policy_scope(policy):
        dropout = keras.layers.Dropout(rate, seed=1)
        found = dropout(np.ones((1000, 1000), "float32"), training=True)
        mean = ops.mean(ops.cast(found, "float32"))
    assert abs(float(mean) - 1.0) < 0.003


@pytest.mark.parametrize("is_first", [True, False])
def test_a_hook_on_dropout_gets_arguments_as_they_came(is_first, monkeypatch):
    owner, name = op_places.DROPOUT
    monkeypatch.setattr(owner, name, getattr(owner, name))
    names, x = [], ops.ones((1000, 1000), "bfloat16")

    def hook():
        inner = getattr(owner, name)

        def dropout(*args, **kwargs):
            names.append([*kwargs])
            return inner(*args, **kwargs)

        setattr(owner, name, dropout)

    if is_first:
        hook()
    tfmix.set_global_policy("mixed_bfloat16")
    if not is_first:
        hook()
    for found in (
        owner.dropout(inputs=x, rate=0.3, seed=1),
        owner.dropout(x, 0.3, seed=1),
    ):
        assert abs(float(ops.mean(ops.cast(found, "float32"))) - 1.0) < 0.003
    assert names == [["inputs", "rate", "seed"], ["seed"]]
