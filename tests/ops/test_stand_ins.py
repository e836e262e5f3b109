"""Ops compute in float32 under a rule, and are Keras's own without one."""

import functools
import sys
import threading

import keras
import numpy as np
import pytest
from keras import ops as kops

from tests import helpers
from tests.ops import test_every_op as every_op
from tfmix._keras import op_places, tracing
from tfmix._keras import variables as keras_variables
from tfmix.autocast.global_policy import policy_scope
from tfmix.ops import stand_ins
from tfmix.policy import op_lists
from tfmix.policy import policy as policies
from tfmix.policy.policy import Policy

# JAX compiles each op again for each dtype, so one of the two is enough.
FORMATS_OF_ALL_OPS = (
    ("bfloat16",) if helpers.ON_JAX else ("float16", "bfloat16")
)


@pytest.fixture(autouse=True)
def _no_rules_before_or_after():
    stand_ins.install(())
    yield
    stand_ins.install(())
    assert not stand_ins.installed()


def available_defaults():
    return [n for n in op_lists.DEFAULT_FLOAT32_OPS if op_places.is_op(n)]


def call(name, x):
    return every_op.form_of(name)(every_op.op_of(name), x, x)


def tensor(values, dtype):
    return kops.cast(kops.convert_to_tensor(values), dtype)


def assert_same(actual, expected):
    assert actual.dtype == expected.dtype
    # NumPy cannot take a bfloat16 scalar of TensorFlow; widening is exact.
    wide = [kops.cast(t, "float32") for t in (actual, expected)]
    if "float" in helpers.dtype_of(actual):
        helpers.assert_same_bits(*wide)
    else:
        helpers.assert_same_bits(actual, expected)


def positive(dtype):
    rng = np.random.default_rng(5)
    return tensor(rng.uniform(0.05, 0.95, (4, 6)).astype("float32"), dtype)


def touched_places():
    names = [*op_places.op_names()]
    return {p: vars(p[0])[p[1]] for n in names for p in op_places.targets(n)}


@pytest.mark.parametrize("dtype", FORMATS_OF_ALL_OPS)
@pytest.mark.parametrize("name", available_defaults())
def test_a_ruled_op_is_the_float32_op_rounded_once_if_it_is_16_bit(name, dtype):
    x = tensor(every_op.matrix(), dtype)
    expected = call(name, kops.cast(x, "float32"))
    if name in op_lists.INSIDE:
        cast = functools.partial(kops.cast, dtype=dtype)
        expected = keras.tree.map_structure(cast, expected)
    stand_ins.install([name])
    actual = call(name, x)
    keras.tree.map_structure(assert_same, actual, expected)


def test_a_long_sum_in_float16_is_exact():
    # 4096 ones, then 4096 times 1/2: each addend is below half a step of the
    # running sum in float16, so a float16 accumulator stands still.
    values = np.concatenate([np.full(4096, 1.0), np.full(4096, 0.5)])
    x = tensor(values, "float16")
    stand_ins.install(["sum", "cumsum"])
    assert float(kops.sum(x)) == 6144.0
    assert float(kops.cumsum(x)[-1]) == 6144.0


@pytest.mark.parametrize("dtype", ["float32", "int32"])
@pytest.mark.parametrize("name", ["sum", "mean", "cumsum", "softmax", "exp"])
def test_wider_and_integer_input_is_untouched(name, dtype):
    x = tensor(np.arange(1, 7).reshape(2, 3), dtype)
    if name == "softmax" and dtype == "int32":
        pytest.skip("Keras has no softmax of integers")
    before = getattr(kops, name)(x)
    stand_ins.install([name])
    assert_same(getattr(kops, name)(x), before)


def test_mixed_input_keeps_the_promotion_of_keras():
    half, single = positive("float16"), positive("float32")
    stand_ins.install(["logaddexp"])
    for first, second in ((half, single), (single, half)):
        assert kops.logaddexp(first, second).dtype == single.dtype
        assert kops.subtract(first, second).dtype == single.dtype


@pytest.mark.parametrize("wanted", ["float16", "float32", "int32"])
@pytest.mark.parametrize("by_name", [True, False])
def test_an_explicit_dtype_argument_is_obeyed(wanted, by_name):
    x = tensor(np.ones(4096), "float16")
    stand_ins.install(["cumsum"])
    if by_name:
        result = kops.cumsum(x, dtype=wanted)
    else:
        result = kops.cumsum(x, None, wanted)
    assert helpers.dtype_of(result) == wanted
    assert float(result[-1]) == 4096.0


def test_axis_keepdims_and_lists_pass_through():
    x = positive("float16")
    stand_ins.install(["sum", "mean", "average", "norm"])
    assert kops.sum(x, axis=(0, 1), keepdims=True).shape == (1, 1)
    assert kops.sum([x, x], axis=0).shape == (4, 6)
    assert float(kops.sum([1, 2, 3])) == 6
    assert kops.average(x, axis=0, weights=[1, 2, 3, 4]).shape == (6,)
    assert kops.norm(x, ord=2, axis=-1).shape == (4,)


@pytest.mark.parametrize(
    ("layer_class", "arguments"),
    [
        (keras.layers.MultiHeadAttention, {"num_heads": 2, "key_dim": 8}),
        (
            keras.layers.GroupQueryAttention,
            {"head_dim": 8, "num_query_heads": 2, "num_key_value_heads": 1},
        ),
    ],
)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("scores", [False, True])
@pytest.mark.parametrize("platform", ["", "cuda"])
def test_attention_of_large_queries_is_finite(
    layer_class, arguments, dropout, scores, platform
):
    layer = layer_class(**arguments, dropout=dropout, dtype="mixed_float16")
    x = np.random.default_rng(4).normal(size=(2, 8, 16)) * 400
    mask = np.ones((2, 8, 8), bool)

    def run():
        result = layer(
            x, x, attention_mask=mask, return_attention_scores=scores
        )
        return keras.tree.flatten(result)

    run()
    stand_ins.install(["dot_product_attention"])
    with tracing.compiled_for(platform):
        results = run()
    for tensor_ in results:
        assert helpers.dtype_of(tensor_) == "float16"
        helpers.assert_all_finite([tensor_])
    assert layer._softmax.dtype_policy.name == "mixed_float16"


@helpers.requires_backend("tensorflow")
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_attention_multiplies_16_bit_factors_on_a_gpu(policy):
    import tensorflow as tf

    rng = np.random.default_rng(0)
    # Unscaled logits of such queries exceed float16.
    size = 60 if policy == "mixed_float16" else 1
    query, key, value = rng.normal(size=(3, 2, 6, 2, 8))
    factors = [
        kops.cast(x, policy.removeprefix("mixed_"))
        for x in (query * size**2, key * size, value)
    ]
    exact = kops.dot_product_attention(
        *[kops.cast(x, "float32") for x in factors]
    )
    attend = tf.function(lambda *factors: kops.dot_product_attention(*factors))
    with policy_scope(policy), tracing.compiled_for("cuda"):
        graph = attend.get_concrete_function(*factors).graph
        found = attend(*factors)
    products = [op for op in graph.get_operations() if op.type == "Einsum"]
    assert {x.dtype for op in products for x in op.inputs} == {factors[0].dtype}
    limit = 0.002 if policy == "mixed_float16" else 0.02
    error = np.linalg.norm(kops.cast(found, "float32") - exact)
    assert error < limit * np.linalg.norm(exact)


def test_numpy_arrays_and_variables_are_covered():
    stand_ins.install(["sum"])
    array = np.full(4096, 3.0, "float16")
    assert float(kops.sum(array)) == 12288.0
    variable = keras.Variable(array, dtype="float16")
    assert float(kops.sum(variable)) == 12288.0
    with keras_variables.autocast("float16"):
        weight = keras.Variable(np.full(4096, 3.0), dtype="float32")
        result = kops.sum(weight)
    assert helpers.dtype_of(result) == "float32"
    assert float(result) == 12288.0


@helpers.requires_backend("tensorflow")
def test_sparse_input_is_untouched():
    import tensorflow as tf

    dense = tf.constant([[0.0, 2.0], [3.0, 0.0]], tf.float16)
    sparse = tf.sparse.from_dense(dense)
    before = kops.sum(sparse, axis=1)
    stand_ins.install(["sum"])
    after = kops.sum(sparse, axis=1)
    assert type(after) is type(before)
    assert after.dtype == before.dtype


def test_gradients_pass_the_casts_in_the_inputs_dtype():
    # The gradient of a mean over 4096 is 2**-12 exactly.
    stand_ins.install(["mean"])
    _, gradient = helpers.with_gradients(kops.mean, np.ones(4096, "float16"))
    assert helpers.dtype_of(gradient) == "float16"
    assert set(helpers.to_numpy(gradient)) == {2.0**-12}


class Sums(keras.layers.Layer):
    """Reaches ops by both of their public names."""

    def call(self, x):
        total = kops.cumsum(x, axis=-1)[:, -1:]
        return total + kops.numpy.sum(x, axis=-1, keepdims=True)


def resized(policy, resize, size):
    """Returns a gradient through resized images, compiled by XLA."""
    import tensorflow as tf

    with policy_scope(policy):
        keras.utils.set_random_seed(1)
        stack = [keras.Input((8, 8, 3)), keras.layers.Conv2D(4, 3)]
        stack += [keras.layers.ReLU(), resize(size)]
        model = keras.Sequential(stack)

    @tf.function(jit_compile=True, autograph=False)
    def gradient(x):
        with tf.GradientTape() as tape:
            total = kops.mean(model(x, training=True) ** 2)
        return tape.gradient(total, model.trainable_variables)[0]

    x = np.random.default_rng(0).normal(size=(2, 8, 8, 3))
    return gradient(tf.constant(x, "float32")).numpy()


@pytest.mark.costly
@helpers.requires_backend("tensorflow")
@pytest.mark.parametrize(
    ("resize", "size"),
    [
        (lambda n: keras.layers.UpSampling2D(n, interpolation="bilinear"), 2),
        (
            lambda n: keras.layers.Lambda(lambda x: kops.image.resize(x, n)),
            (7,) * 2,
        ),
    ],
    ids=["layer", "op"],
)
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_xla_compiles_the_gradient_of_resized_images(policy, resize, size):
    found, exact = (resized(p, resize, size) for p in (policy, "float32"))
    scale = np.abs(exact).max()
    dtype = policy.removeprefix("mixed_")
    helpers.assert_close(found / scale, exact / scale, dtype)


def test_a_functional_model_obeys_the_rules_active_when_it_runs():
    inputs = keras.Input((8192,), dtype="float16")
    sums = Sums(dtype="mixed_float16")(kops.cumsum(inputs, axis=-1) / 4096)
    model = keras.Model(inputs, sums)
    x = np.full((1, 8192), 0.5, "float16")
    # 2048 + 0.5 rounds to 2048, or to 2050 at best, but the sum is 4096. The
    # sum of the quotients, which the layer casts, is 4096.5.
    with stand_ins.block(["cumsum", "sum"]):
        assert float(model(x)[0, 0]) == pytest.approx(8193.0, rel=2e-4)
    stand_ins.install(op_lists.default_float32_ops())
    found = model.predict(x, verbose=0)[0, 0]
    assert float(found) == pytest.approx(8193.0, rel=2e-4)


# Keras's backends have no function of their own for mish.
@pytest.mark.parametrize("name", ["softmax", "mish"])
def test_activations_and_layers_obey_the_rules(name):
    x = tensor(np.linspace(-8, 8, 24).reshape(2, 12), "bfloat16")
    activation = getattr(keras.activations, name)
    expected = activation(kops.cast(x, "float32"))
    stand_ins.install([name])
    assert_same(activation(x), expected)
    layer = keras.layers.Activation(name, dtype="bfloat16")
    assert_same(
        kops.cast(layer(x), "bfloat16"), kops.cast(expected, "bfloat16")
    )


@pytest.mark.parametrize("name", ["matmul", "multiply", "maximum"])
def test_a_rule_holds_for_an_op_with_replacements_of_other_kinds(
    monkeypatch, name
):
    # These are weight gradients or finite constants; Keras computes in 16 bit.
    module = sys.modules[op_places.BACKEND_OPS.numpy.__name__]
    original, seen = getattr(module, name), []

    def spy(x1, x2):
        seen.append(helpers.dtype_of(x1))
        return original(x1, x2)

    spy.__module__ = module.__name__
    monkeypatch.setattr(module, name, spy)
    x = tensor(np.ones((2, 2)), "float16")
    for names in [name], []:
        with policy_scope(Policy("mixed_float16", float32_ops=names)):
            result = getattr(kops, name)(x, kops.ones_like(x))
        assert helpers.dtype_of(result) == ("float32" if names else "float16")
    assert seen == ["float32", "float16"]


def test_blocks_of_many_threads_leave_keras_as_it_was():
    before = touched_places()
    x = tensor(np.full((1, 1024), 10.0), "float16")
    failures = []

    def computed(names):
        with stand_ins.block([*names, policies.SIXTEEN_BIT]):
            return float(kops.max(kops.normalize(x)))

    def work(names, expected):
        for _ in range(20):
            got = computed(names)
            if got != expected:
                failures.append(got)

    # The sum of the squares is 102,400.
    rules = ["normalize"], []
    jobs = [(names, computed(names)) for names in rules] * 2
    assert jobs[0][1] == 0.03125 != jobs[1][1]
    threads = [threading.Thread(target=work, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    stand_ins.install(())
    assert touched_places() == before
