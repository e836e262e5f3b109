"""A large gradient is held as what it comes from; the step stays the same."""

import keras
import numpy as np
import pytest

if keras.backend.backend() != "tensorflow":
    pytest.skip("XLA orders JAX's operations itself", allow_module_level=True)

import tensorflow as tf

from tests import helpers
from tfmix.scaling import optimizer as optimizers
from tfmix.scaling.step import blocks, branch, deferred

POLICIES = ("float32", "mixed_float16", "mixed_bfloat16")


@pytest.fixture(autouse=True)
def any_size_is_large(monkeypatch):
    monkeypatch.setattr(branch, "_LARGE", 0)
    monkeypatch.setattr(deferred, "_LARGE", 1)


def model(policy, batch=2):
    keras.utils.set_random_seed(0)
    dense = [
        keras.layers.Dense(units, dtype=policy, activation=activation)
        for units, activation in ((24, "tanh"), (16, "tanh"), (40, None))
    ]
    return keras.Sequential([keras.Input((32,), batch_size=batch), *dense])


def gradients_of(network, data, optimizer):
    trained = network.trainable_variables
    with tf.GradientTape() as tape:
        output = keras.ops.cast(network(data, training=True), "float32")
        loss = optimizer.scale_loss(tf.reduce_mean(tf.square(output)))
    return tape.gradient(loss, [variable.value for variable in trained])


def recipes(network, batch, read=lambda grads: None):
    """Returns, of each kernel, the operations that its recipe repeats."""
    found = []
    optimizer = optimizers.LossScaleOptimizer(keras.optimizers.Adam())
    optimizer.build(network.trainable_variables)

    @tf.function(autograph=False)
    def step(data):
        grads = gradients_of(network, data, optimizer)
        read(grads)
        made = deferred.deferred(
            blocks.joined(grads, network.trainable_variables)
        )
        found.extend(
            [each.type for each in block.recipe._last_to_first]
            if block.recipe
            else []
            for block in made
            if len(block.tensor.shape) == 2
        )
        return tf.add_n([tf.reduce_sum(block.tensor[0]) for block in made[:1]])

    step.get_concrete_function(tf.TensorSpec((batch, 32)))
    return found


@pytest.mark.parametrize(
    ("policy", "batch", "expected"),
    [
        ("float32", 2, ["MatMul"]),
        ("mixed_bfloat16", 2, ["Cast", "MatMul"]),
        ("mixed_float16", 2, ["Cast"]),
        ("float32", 64, []),
        ("mixed_bfloat16", 64, ["Cast"]),
        ("float32", None, []),
        ("mixed_float16", None, ["Cast"]),
    ],
)
def test_what_is_smaller_is_held(policy, batch, expected):
    assert recipes(model(policy, batch), batch) == [expected] * 3


def test_a_gradient_that_is_read_elsewhere_is_computed_once():
    network = model("mixed_bfloat16")
    assert recipes(network, 2, read=tf.linalg.global_norm) == [[]] * 3


def test_xla_holds_what_it_wants(monkeypatch):
    def refuse(step):
        raise AssertionError("XLA orders its own operations")

    monkeypatch.setattr(deferred, "deferred", refuse)
    optimizer = optimizers.LossScaleOptimizer(keras.optimizers.Adam())
    by_loop(model("float32"), optimizer, xla=True)
    assert int(optimizer.iterations) == 4


def test_an_eager_gradient_is_there_already():
    (block,) = deferred.deferred([blocks.Block(tf.zeros((4, 4)), (0,))])
    assert block.recipe is None


def trained(policy, run, **options):
    network = model(policy)
    inner = keras.optimizers.AdamW(0.01, **options)
    optimizer = optimizers.LossScaleOptimizer(inner)
    run(network, optimizer)
    return [np.array(v) for v in (*network.weights, *optimizer.variables)]


def by_fit(network, optimizer):
    x = np.random.default_rng(0).normal(size=(8, 32)).astype("float32")
    network.compile(optimizer, "mse", jit_compile=False)
    network.fit(x, x[:, :1] * np.ones((1, 40)), 2, shuffle=False, verbose=0)


def by_loop(network, optimizer, data=None, xla=False):
    if data is None:
        data = np.random.default_rng(0).normal(size=(4, 2, 32))
    optimizer.build(network.trainable_variables)

    @tf.function(autograph=False, jit_compile=xla)
    def step(data):
        grads = gradients_of(network, data, optimizer)
        optimizer.apply(grads, network.trainable_variables)

    for batch in data:
        step(tf.constant(batch, tf.float32))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("run", "options"),
    [
        (by_fit, {}),
        (by_loop, {}),
        (by_loop, {"global_clipnorm": 0.1, "use_ema": True}),
        (by_loop, {"gradient_accumulation_steps": 2, "clipnorm": 0.1}),
    ],
    ids=["fit", "loop", "clipped", "accumulated"],
)
def test_every_bit_is_that_of_a_step_that_holds_them(
    policy, run, options, monkeypatch
):
    computed_later = trained(policy, run, **options)
    monkeypatch.setattr(deferred, "_LARGE", 2**40)
    for later, held in zip(
        computed_later, trained(policy, run, **options), strict=True
    ):
        helpers.assert_same_bits(later, held)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_factor_skips_the_step(policy, bad):
    network = model(policy)
    optimizer = optimizers.LossScaleOptimizer(keras.optimizers.Adam())
    before = [np.array(weight) for weight in network.weights]
    data = np.ones((1, 2, 32))
    data[0, 0, 3] = bad
    by_loop(network, optimizer, data)
    assert int(optimizer.skipped_steps) == 1
    for weight, old in zip(network.weights, before, strict=True):
        helpers.assert_same_bits(np.array(weight), old)
    by_loop(network, optimizer, np.ones((1, 2, 32)))
    assert int(optimizer.iterations) == 1


def product_step(left, right):
    """Applies two products, one of ones, to variables of zeros, by SGD."""
    variables = [keras.Variable(np.zeros((8, n), "float32")) for n in (8, 9)]
    optimizer = optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(1.0), initial_scale=1.0
    )
    optimizer.build(variables)
    optimizer.scale_loss(1.0)

    @tf.function(autograph=False)
    def step(left, right):
        products = [left @ right, left[:, :1] ** 0 @ tf.ones((1, 9))]
        optimizer.apply(products, variables)
        assert not any(product.consumers() for product in products)

    step(tf.constant(left, "float32"), tf.constant(right, "float32"))
    changes = [-np.array(variable) for variable in variables]
    return changes, list(optimizer.overflow_counts.values())


def test_large_norms_of_a_finite_product_call_for_a_closer_look():
    left, right = np.zeros((8, 1)), np.full((1, 8), 1e8)
    left[0] = 1e30
    (product, ones), overflows = product_step(left, right)
    np.testing.assert_allclose(product, left @ right, rtol=1e-6)
    assert ones.all()
    assert overflows == [0, 0]


def test_an_overflowing_product_of_finite_factors_is_blamed():
    changes, overflows = product_step(
        np.full((8, 1), 1e25), np.full((1, 8), 1e15)
    )
    assert not any(change.any() for change in changes)
    assert overflows == [1, 0]


def test_a_product_is_not_looked_for_behind_a_narrower_cast():
    @tf.function(autograph=False)
    def step(left):
        narrow = tf.cast(tf.matmul(left, left, transpose_b=True), "float16")
        wide = blocks.Block(tf.cast(narrow, "float32"), (0,))
        (block,) = deferred.deferred([wide])
        assert block.recipe.squares() is None
        return block.recipe.computed()

    assert np.isinf(step(tf.fill((8, 1), 1e5)).numpy()).all()


@pytest.mark.parametrize("exponent", [-30, 0, 9])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_number_of_a_product_exceeds_its_bound(exponent, dtype):
    rng = np.random.default_rng(exponent + 99)
    left, right = (
        tf.cast(rng.standard_cauchy((16, 2)) * 10.0**exponent, dtype)
        for _ in range(2)
    )

    @tf.function(autograph=False)
    def bound_and_product():
        product = tf.matmul(left, right, transpose_b=True)
        (block,) = deferred.deferred([blocks.Block(product, (0,))])
        return block.recipe.squares(), tf.cast(product, "float32")

    bound, product = bound_and_product()
    assert float(bound) >= float(np.max(np.abs(product.numpy()))) ** 2
