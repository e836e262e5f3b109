"""Op rules: float32 inside, 16 bit outside, and Keras exact when off."""

import sys
import threading

import keras
import numpy as np
import pytest
from keras import ops as kops

from tests import helpers
from tfmix._keras import compilation, layers, op_places
from tfmix.autocast import interceptor
from tfmix.autocast.global_policy import policy_scope
from tfmix.policy import float32_ops
from tfmix.policy.policy import Policy

# JAX compiles each op again for each dtype, so one of the two is enough.
FORMATS_OF_ALL_OPS = (
    ("float16", "bfloat16")
    if keras.backend.backend() == "tensorflow"
    else ("bfloat16",)
)
LINEAR_ALGEBRA = (
    "cholesky",
    "det",
    "eigh",
    "inv",
    "lstsq",
    "qr",
    "slogdet",
    "solve",
    "solve_triangular",
    "svd",
)


def definite(x):
    """Returns a positive definite matrix that both formats hold exactly."""
    places = np.arange(4)
    values = 2.0 ** -abs(places[:, None] - places) + np.diag(places)
    return tensor(values, x.dtype)


# These call each default op on one (4, 6) tensor of positive numbers.
SPECIAL_CALLS = {
    "logaddexp": lambda f, x: f(x, x),
    "logaddexp2": lambda f, x: f(x, x),
    "power": lambda f, x: f(x, 3),
    "cdist": lambda f, x: f(x, x),
    "rms_normalization": lambda f, x: f(x),
    "segment_sum": lambda f, x: f(x, np.array([0, 0, 1, 1]), num_segments=2),
    "average_pool": lambda f, x: f(
        x[None], (2,), (2,), data_format="channels_last"
    ),
    "adaptive_average_pool": lambda f, x: f(
        x[None], 2, data_format="channels_last"
    ),
    "dot_product_attention": lambda f, x: f(
        *[kops.reshape(x, (1, 4, 1, 6))] * 3
    ),
    "categorical_crossentropy": lambda f, x: f(x, x),
    "binary_crossentropy": lambda f, x: f(x, x),
    "sparse_categorical_crossentropy": lambda f, x: f(
        np.array([0, 1, 2, 3]), x
    ),
    "lstsq": lambda f, x: f(definite(x), x),
    "solve": lambda f, x: f(definite(x), x),
    "solve_triangular": lambda f, x: f(definite(x), x, lower=True),
    **dict.fromkeys(
        ("cholesky", "det", "eigh", "inv", "slogdet"),
        lambda f, x: f(definite(x)),
    ),
}
# These cannot be compared with Keras. TensorFlow has no 16-bit kernel for them,
# and under JAX this loss is float32 because its one-hot table is.
NO_16_BIT_IN_KERAS = (
    "sparsemax",
    "erfinv",
    "sparse_categorical_crossentropy",
    *LINEAR_ALGEBRA,
)


@pytest.fixture(autouse=True)
def _no_rules_before_or_after():
    interceptor.install(())
    yield
    interceptor.install(())
    assert not interceptor.installed()


def available_defaults():
    return [n for n in float32_ops.DEFAULT_FLOAT32_OPS if op_places.is_op(n)]


def call(name, x):
    return SPECIAL_CALLS.get(name, lambda f, x: f(x))(getattr(kops, name), x)


def tensor(values, dtype):
    return kops.cast(kops.convert_to_tensor(values), dtype)


def assert_same(actual, expected):
    assert actual.dtype == expected.dtype
    # NumPy cannot take a bfloat16 scalar of TensorFlow; widening is exact.
    wide = [kops.cast(t, "float32") for t in (actual, expected)]
    if "float" in keras.backend.standardize_dtype(actual.dtype):
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
def test_a_ruled_op_is_the_float32_op_rounded_once(name, dtype):
    x = positive(dtype)
    expected = keras.tree.map_structure(
        lambda t: kops.cast(t, dtype), call(name, kops.cast(x, "float32"))
    )
    interceptor.install([name])
    actual = call(name, x)
    keras.tree.map_structure(assert_same, actual, expected)


@pytest.mark.parametrize(
    "name", [n for n in available_defaults() if n not in NO_16_BIT_IN_KERAS]
)
def test_a_rule_changes_no_result_dtype_and_no_shape(name):
    x = positive("float16")
    before = call(name, x)
    interceptor.install([name])
    after = call(name, x)
    keras.tree.assert_same_structure(before, after)
    for left, right in zip(
        keras.tree.flatten(before), keras.tree.flatten(after), strict=True
    ):
        assert left.dtype == right.dtype
        assert left.shape == right.shape


def test_a_long_sum_in_float16_is_exact():
    # 4096 ones, then 4096 times 1/2: each addend is below half a step of the
    # running sum in float16, so a float16 accumulator stands still.
    values = np.concatenate([np.full(4096, 1.0), np.full(4096, 0.5)])
    x = tensor(values, "float16")
    interceptor.install(["sum", "cumsum"])
    assert float(kops.sum(x)) == 6144.0
    assert float(kops.cumsum(x)[-1]) == 6144.0


@pytest.mark.parametrize("dtype", ["float32", "int32"])
@pytest.mark.parametrize("name", ["sum", "mean", "cumsum", "softmax", "exp"])
def test_wider_and_integer_input_is_untouched(name, dtype):
    x = tensor(np.arange(1, 7).reshape(2, 3), dtype)
    if name == "softmax" and dtype == "int32":
        pytest.skip("Keras has no softmax of integers")
    before = getattr(kops, name)(x)
    interceptor.install([name])
    assert_same(getattr(kops, name)(x), before)


def test_mixed_input_keeps_the_promotion_of_keras():
    half, single = positive("float16"), positive("float32")
    interceptor.install(["power", "logaddexp"])
    assert kops.logaddexp(half, single).dtype == single.dtype
    assert kops.power(half, 2).dtype == half.dtype
    assert kops.power(half, 0.5).dtype == half.dtype


@pytest.mark.parametrize("wanted", ["float16", "float32", "int32"])
@pytest.mark.parametrize("by_name", [True, False])
def test_an_explicit_dtype_argument_is_obeyed(wanted, by_name):
    x = tensor(np.ones(4096), "float16")
    interceptor.install(["cumsum"])
    if by_name:
        result = kops.cumsum(x, dtype=wanted)
    else:
        result = kops.cumsum(x, None, wanted)
    assert keras.backend.standardize_dtype(result.dtype) == wanted
    assert float(result[-1]) == 4096.0


def test_axis_keepdims_and_lists_pass_through():
    x = positive("float16")
    interceptor.install(["sum", "mean", "average", "norm"])
    assert kops.sum(x, axis=(0, 1), keepdims=True).shape == (1, 1)
    assert kops.sum([x, x], axis=0).shape == (4, 6)
    assert float(kops.sum([1, 2, 3])) == 6
    assert kops.average(x, axis=0, weights=[1, 2, 3, 4]).dtype == x.dtype
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
    interceptor.install(["dot_product_attention"])
    with compilation.compiled_for(platform):
        results = run()
    for tensor_ in results:
        assert keras.backend.standardize_dtype(tensor_.dtype) == "float16"
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
    with policy_scope(policy), compilation.compiled_for("cuda"):
        graph = attend.get_concrete_function(*factors).graph
        found = attend(*factors)
    products = [op for op in graph.get_operations() if op.type == "Einsum"]
    assert {x.dtype for op in products for x in op.inputs} == {factors[0].dtype}
    limit = 0.002 if policy == "mixed_float16" else 0.02
    error = np.linalg.norm(kops.cast(found, "float32") - exact)
    assert error < limit * np.linalg.norm(exact)


def test_numpy_arrays_and_variables_are_covered():
    interceptor.install(["sum"])
    array = np.full(4096, 3.0, "float16")
    assert float(kops.sum(array)) == 12288.0
    variable = keras.Variable(array, dtype="float16")
    assert float(kops.sum(variable)) == 12288.0
    with layers.autocast("float16"):
        weight = keras.Variable(np.full(4096, 3.0), dtype="float32")
        result = kops.sum(weight)
    assert keras.backend.standardize_dtype(result.dtype) == "float16"
    assert float(result) == 12288.0


@helpers.requires_backend("tensorflow")
def test_sparse_input_is_untouched():
    import tensorflow as tf

    dense = tf.constant([[0.0, 2.0], [3.0, 0.0]], tf.float16)
    sparse = tf.sparse.from_dense(dense)
    before = kops.sum(sparse, axis=1)
    interceptor.install(["sum"])
    after = kops.sum(sparse, axis=1)
    assert type(after) is type(before)
    assert after.dtype == before.dtype


def test_gradients_pass_the_casts_in_the_inputs_dtype():
    # The gradient of a mean over 4096 is 2**-12 exactly.
    x = np.ones(4096, "float16")
    interceptor.install(["mean"])
    gradient = _gradient(kops.mean, x)
    assert str(gradient.dtype) == "float16"
    assert set(gradient.tolist()) == {2.0**-12}


def _gradient(function, array):
    if keras.backend.backend() == "jax":
        import jax

        return np.asarray(jax.grad(function)(array))
    import tensorflow as tf

    x = tf.constant(array)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = function(x)
    return tape.gradient(y, x).numpy()


def test_a_functional_model_obeys_the_rules_active_when_it_runs():
    inputs = keras.Input((8192,), dtype="float16")
    model = keras.Model(inputs, kops.cumsum(inputs, axis=-1))
    x = np.full((1, 8192), 0.5, "float16")
    # 2048 + 0.5 rounds to 2048, or to 2050 at best, but the sum is 4096.
    with interceptor.block(["cumsum"]):
        assert float(model(x)[0, -1]) == 4096.0
    interceptor.install(["cumsum"])
    assert float(model.predict(x, verbose=0)[0, -1]) == 4096.0


class Penalty(keras.layers.Layer):
    """A custom layer that reaches the ops in every way."""

    def call(self, x):
        total = kops.cumsum(x, axis=-1)[:, -1:]
        return total + kops.numpy.sum(x, axis=-1, keepdims=True)


def test_a_custom_layer_obeys_the_rules_eagerly_and_traced():
    layer = Penalty(dtype="mixed_float16")
    x = np.full((2, 8192), 0.5, "float16")
    interceptor.install(float32_ops.default_float32_ops())
    assert float(layer(x)[0, 0]) == 8192.0
    model = keras.Sequential([layer])
    assert float(model.predict(x, verbose=0)[0, 0]) == 8192.0


def test_activations_and_layers_obey_the_rules():
    x = tensor(np.linspace(-8, 8, 24).reshape(2, 12), "bfloat16")
    expected = keras.activations.softmax(kops.cast(x, "float32"))
    interceptor.install(["softmax"])
    expected = kops.cast(expected, "bfloat16")
    assert_same(keras.activations.softmax(x), expected)
    layer = keras.layers.Activation("softmax", dtype="bfloat16")
    assert_same(layer(x), expected)


def test_an_activation_without_a_backend_function_can_be_listed():
    x = positive("bfloat16")
    expected = keras.activations.mish(kops.cast(x, "float32"))
    interceptor.install(["mish"])
    assert_same(keras.activations.mish(x), kops.cast(expected, "bfloat16"))


@helpers.requires_backend("tensorflow")
def test_the_logits_of_a_softmax_are_still_found():
    x = positive("float16")
    interceptor.install(["softmax"])
    y = keras.activations.softmax(x)
    assert y._keras_logits.dtype == x.dtype


@pytest.mark.parametrize("name", ["matmul", "multiply", "maximum"])
def test_a_rule_holds_for_an_op_with_replacements_of_other_kinds(
    monkeypatch, name
):
    # These are weight gradients or finite constants; Keras computes in 16 bit.
    module = sys.modules[op_places.BACKEND_OPS.numpy.__name__]
    original, seen = getattr(module, name), []

    def spy(x1, x2):
        seen.append(keras.backend.standardize_dtype(x1.dtype))
        return original(x1, x2)

    spy.__module__ = module.__name__
    monkeypatch.setattr(module, name, spy)
    x = tensor(np.ones((2, 2)), "float16")
    for names in [name], []:
        with policy_scope(Policy("mixed_float16", float32_ops=names)):
            result = getattr(kops, name)(x, x)
        assert keras.backend.standardize_dtype(result.dtype) == "float16"
    assert seen == ["float32", "float16"]


@pytest.mark.parametrize("name", ["add", "cast", "sum", "where", "exp"])
def test_one_wrapper_precedes_keras_own_function(name):
    ((package, theme),) = op_places.targets(name)
    original = vars(getattr(package, theme))[name]
    with policy_scope("mixed_float16"):
        stand_in = vars(getattr(package, theme))[name]
        assert stand_in.__wrapped__ is original
        # Code that has imported the function itself still has the original.
        assert vars(sys.modules[original.__module__])[name] is original
    assert vars(getattr(package, theme))[name] is original


def test_installing_twice_is_as_once_and_a_new_list_replaces_the_old():
    before = touched_places()
    interceptor.install(["sum", "exp"])
    once = touched_places()
    interceptor.install(["exp", "sum"])
    assert touched_places() == once
    assert interceptor.installed() == {"exp", "sum"}
    interceptor.install(["normalize"])
    changed = [p for p, f in touched_places().items() if f is not before[p]]
    assert {attribute for _, attribute in changed} == {"_normalize"}


def test_a_block_overrides_what_is_installed_and_ends_with_it():
    x = tensor(np.full((1, 1024), 10.0), "float16")
    interceptor.install(["normalize"])
    with interceptor.block([]):
        assert float(kops.max(kops.normalize(x))) == 0.0
        with interceptor.block(["normalize"]):
            assert float(kops.max(kops.normalize(x))) == 0.03125
        assert float(kops.max(kops.normalize(x))) == 0.0
    assert float(kops.max(kops.normalize(x))) == 0.03125


def test_blocks_of_many_threads_leave_keras_as_it_was():
    before = touched_places()
    x = tensor(np.full((1, 1024), 10.0), "float16")
    failures = []

    def work(names, expected):
        for _ in range(20):
            with interceptor.block(names):
                got = float(kops.max(kops.normalize(x)))
            if got != expected:
                failures.append(got)

    jobs = [(["normalize", "sum"], 0.03125), (["sum"], 0.0)] * 2
    threads = [threading.Thread(target=work, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert touched_places() == before


def test_someone_elses_replacement_is_left_alone(monkeypatch):
    owner, attribute = op_places.targets("normalize")[0]
    original = vars(owner)[attribute]
    interceptor.install(["normalize"])
    rule = vars(owner)[attribute]

    def theirs(*args, **kwargs):
        return rule(*args, **kwargs)

    monkeypatch.setattr(owner, attribute, theirs)
    interceptor.install(())
    assert vars(owner)[attribute] is theirs
    x = np.full((1, 1024), 10.0, "float16")
    assert float(kops.max(kops.normalize(x))) == 0.0
    monkeypatch.setattr(owner, attribute, original)


def test_lists_are_copies_that_can_be_extended_and_shortened():
    mine = float32_ops.default_float32_ops()
    mine.clear()
    assert "softmax" in float32_ops.default_float32_ops()
    assert float32_ops.default_float32_ops(add=["gelu"])[-1] == "gelu"
    assert "sum" not in float32_ops.default_float32_ops(remove=["sum"])


def test_the_default_list_has_no_double_and_only_real_ops():
    assert (
        float32_ops.resolve(float32_ops.DEFAULT_FLOAT32_OPS)
        == float32_ops.DEFAULT_FLOAT32_OPS
    )
    missing = [
        n for n in float32_ops.DEFAULT_FLOAT32_OPS if not op_places.is_op(n)
    ]
    if keras.version() >= "3.15":
        assert missing == []


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        (["sofmax"], ValueError, r"'sofmax'.*Did you mean 'softmax'\?"),
        (["sum", "sum"], ValueError, "twice.*'sum'"),
        (["cast"], ValueError, "take tensors.*'cast'"),
        ("sum", TypeError, r"list of op names.*float32_ops='sum'"),
        ([keras.ops.sum], TypeError, "takes names.*function"),
    ],
)
def test_a_wrong_list_is_an_error(names, error, message):
    with pytest.raises(error, match=message):
        float32_ops.resolve(names)
    with pytest.raises(error, match=message):
        Policy("mixed_float16", float32_ops=names)


def test_kept_replacements_are_made_once_and_removed_by_an_install():
    before = touched_places()
    interceptor.keep(frozenset(["normalize"]))
    standing = touched_places()
    assert standing != before
    with interceptor.block(["normalize"]):
        assert touched_places() == standing
    assert touched_places() == standing
    x = tensor(np.full((1, 1024), 10.0), "float16")
    assert float(kops.max(kops.normalize(x))) == 0.0
    interceptor.install(())
    assert touched_places() == before


def test_removing_what_is_not_on_the_list_is_an_error():
    message = "`remove`.*'softmx'.*'softmax'"
    with pytest.raises(ValueError, match=message):
        float32_ops.default_float32_ops(remove=["softmx"])
