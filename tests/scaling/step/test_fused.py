"""Fewer passes over memory, and not a bit of difference."""

import keras
import numpy as np
import pytest

if keras.backend.backend() != "tensorflow":
    pytest.skip("XLA fuses JAX's updates itself", allow_module_level=True)

import tensorflow as tf

from tests import helpers
from tfmix.scaling import optimizer as optimizers
from tfmix.scaling.step import branch, fused
from tfmix.variables import master as masters

PRODUCT, QUOTIENT = "ResourceApplyGradientDescent", "ResourceApplyAdagradV2"
# How often each form occurs in the update of one variable.
FORMS = {
    "Adam": (2, 1),
    "AdamW": (2, 1),
    "Adamax": (1, 0),
    "Lion": (1, 0),
    "SGD": (1, 0),
}


def operations(function):
    """Returns the types of all operations that a function calls."""
    graph = function.get_concrete_function().graph.as_graph_def()
    nodes = [*graph.node]
    for each in graph.library.function:
        nodes.extend(each.node_def)
    return [node.op for node in nodes]


def counted(types):
    return types.count(PRODUCT), types.count(QUOTIENT)


def numbers(rng, dtype, size=100_003):
    """Returns numbers of all magnitudes, zeros of either sign among them."""
    info = np.finfo("float16" if dtype == "float16" else "float32")
    exponents = rng.uniform(np.log2(info.tiny), np.log2(info.max), size)
    found = rng.choice([-1.0, 1.0], size) * 2.0**exponents
    found[:7], found[-7:] = 0.0, -0.0
    return tf.cast(found, dtype)


def written(update, *values, one_pass=True):
    """Returns what an update makes of variables, and its operations."""
    variables = [tf.Variable(value) for value in values]
    optimizer = keras.optimizers.SGD()

    @tf.function(autograph=False)
    def function():
        with fused.updates(optimizer if one_pass else None):
            update(optimizer, *variables)

    function()
    return [each.numpy() for each in variables], operations(function)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("sign", ["assign_add", "assign_sub"])
def test_a_product_rounds_as_two_operations_do(sign, dtype):
    rng = np.random.default_rng(0)
    value, tensor = numbers(rng, dtype), numbers(rng, dtype)
    number = tf.constant(0.1, dtype)

    def update(optimizer, variable):
        getattr(optimizer, sign)(variable, tensor * number)

    (one,), types = written(update, value)
    (two,), _ = written(update, value, one_pass=False)
    assert counted(types) == (1, 0)
    helpers.assert_same_bits(one, two)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_a_quotient_rounds_as_five_operations_do(dtype):
    rng = np.random.default_rng(0)
    value, tensor = numbers(rng, dtype), numbers(rng, dtype)
    squares = tf.abs(numbers(rng, dtype))

    def update(optimizer, variable, other):
        root = tf.sqrt(other) + tf.constant(1e-3, dtype)
        step = tensor * tf.constant(0.1, dtype) / root
        optimizer.assign_sub(variable, step)

    one, types = written(update, value, squares)
    two, _ = written(update, value, squares, one_pass=False)
    assert counted(types) == (0, 1)
    for left, right in zip(one, two, strict=True):
        helpers.assert_same_bits(left, right)


SHAPES = [(33, 7), (7,), (), (64, 16)]


def stepped(optimizer, steps=5, seed=0):
    """Returns variables after a few steps, and the operations of one."""
    rng = np.random.default_rng(seed)
    model = [
        keras.Variable(rng.normal(size=shape).astype("float32"))
        for shape in SHAPES
    ]
    grads = [
        [tf.constant(rng.normal(size=shape), tf.float32) for shape in SHAPES]
        for _ in range(steps)
    ]
    optimizer.build(model)
    scale = optimizer.scale_loss(1.0)
    index = tf.Variable(0)

    @tf.function(autograph=False)
    def step():
        stacked = [
            tf.stack(each)[index] * scale for each in zip(*grads, strict=True)
        ]
        optimizer.apply(stacked, model)

    for number in range(steps):
        index.assign(number)
        step()
    results = [np.array(each) for each in (*model, *optimizer.variables)]
    return results, operations(step)


def assert_as_without(run, monkeypatch):
    """Asserts that a run gives the same bits in single operations.

    Args:
        run: Function that returns variables, and operations.

    Returns:
        The operations with and without.
    """
    fewer, types = run()
    with monkeypatch.context() as single:
        single.setattr(fused, "_writes_as_keras_does", lambda optimizer: False)
        plain, plain_types = run()
    for one, two in zip(fewer, plain, strict=True):
        helpers.assert_same_bits(one, two)
    return types, plain_types


@pytest.fixture(params=["whole", "taken apart"])
def conditional(request, monkeypatch):
    """Runs a test with either form of the step's conditional."""
    if request.param == "taken apart":
        monkeypatch.setattr(branch, "_LARGE", 0)


@pytest.mark.usefixtures("conditional")
@pytest.mark.parametrize("name", helpers.optimizer_names())
def test_every_optimizer_steps_as_without(name, monkeypatch):
    if name == "Muon" and keras.version().startswith("3.12."):
        pytest.skip("Keras 3.12's own Muon fails under TensorFlow")

    def run():
        inner = helpers.make_optimizer(name)
        return stepped(optimizers.LossScaleOptimizer(inner))

    types, plain_types = assert_as_without(run, monkeypatch)
    assert counted(plain_types) == (0, 0)
    assert len(types) <= len(plain_types) + 2


@pytest.mark.parametrize(("name", "forms"), FORMS.items())
def test_what_has_a_form_takes_one_pass(name, forms):
    inner = getattr(keras.optimizers, name)(0.01)
    _, types = stepped(optimizers.LossScaleOptimizer(inner))
    products, quotients = (count * len(SHAPES) for count in forms)
    assert counted(types) == (products, quotients)


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 2},
        {"use_ema": True, "ema_overwrite_frequency": 2},
        {"global_clipnorm": 0.5, "weight_decay": 0.1},
    ],
    ids=["accumulated", "averaged", "clipped"],
)
def test_whatever_surrounds_an_update(options, monkeypatch):
    def run():
        inner = keras.optimizers.Adam(0.01, **options)
        return stepped(optimizers.LossScaleOptimizer(inner))

    types, _ = assert_as_without(run, monkeypatch)
    assert counted(types) == (8, 4)


def test_a_nested_optimizer_takes_one_pass():
    inner = masters.MasterWeightOptimizer(keras.optimizers.Adam(0.01))
    _, types = stepped(optimizers.LossScaleOptimizer(inner))
    assert counted(types) == (8, 4)


def test_the_optimizer_is_its_own_again_afterwards():
    inner = keras.optimizers.Adam(0.01)
    stepped(optimizers.LossScaleOptimizer(inner))
    assert not {"assign_add", "assign_sub"} & set(vars(inner))


class Counting(keras.optimizers.SGD):
    """Writes its variables in a way of its own."""

    calls = 0

    def assign_sub(self, variable, value):
        self.calls += 1
        super().assign_sub(variable, value)


def test_an_optimizer_that_writes_in_its_own_way_keeps_it():
    inner = Counting()
    _, types = stepped(optimizers.LossScaleOptimizer(inner))
    assert counted(types) == (0, 0)
    assert inner.calls == len(SHAPES)


def test_on_two_replicas_each_takes_one_pass():
    strategy = helpers.mirrored_strategy()
    with strategy.scope():
        weight = keras.Variable(np.ones((4, 4), "float32"))
        optimizer = optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.5))
        optimizer.build([weight])
    optimizer.scale_loss(1.0)
    gradient = tf.ones((4, 4)) * 2.0**15

    @tf.function(autograph=False)
    def step():
        strategy.run(lambda: optimizer.apply([gradient], [weight]))

    step()
    assert counted(operations(step)) == (4, 2)
    for replica in weight.value.values:
        np.testing.assert_allclose(replica.numpy(), 0.5, rtol=1e-5)


def unfused(update):
    """Asserts that an update of two variables is left as it is."""
    start = np.full(3, 4.0, "float32")
    (variable, _), types = written(update, start, start)
    assert counted(types) == (0, 0)
    return variable.tolist()


def adam_like(variable, other, epsilon=1.0):
    return tf.constant([3.0] * 3) * 2.0 / (tf.sqrt(other) + epsilon)


def test_a_root_read_before_the_last_write_is_the_old_one():
    def update(optimizer, variable, other):
        step = adam_like(variable, other)
        optimizer.assign_add(other, tf.ones(3) + 4.0)
        optimizer.assign_sub(variable, step)

    assert unfused(update) == [2.0] * 3


def test_a_write_within_a_branch_counts():
    def update(optimizer, variable, other):
        step = adam_like(variable, other)
        wrote = tf.cond(
            tf.reduce_all(tf.constant([True])),
            lambda: tf.identity(other.assign(tf.zeros(3))),
            lambda: tf.zeros(3),
        )
        with tf.control_dependencies([wrote]):
            optimizer.assign_sub(variable, step)

    assert unfused(update) == [2.0] * 3


def test_a_variable_over_its_own_root_is_left_alone():
    def update(optimizer, variable, other):
        optimizer.assign_sub(variable, adam_like(variable, variable))

    assert unfused(update) == [2.0] * 3


def test_without_epsilon_tensorflow_takes_another_root():
    def update(optimizer, variable, other):
        optimizer.assign_sub(variable, adam_like(variable, other, 0.0))

    assert unfused(update) == [1.0] * 3


OTHERS = {
    "two tensors": lambda variable: tf.ones(3) * tf.ones(3),
    "a longer tensor": lambda variable: tf.ones(1) * tf.ones(3),
    "an array": lambda variable: np.ones(3, "float32"),
    "a chain of products": lambda variable: variable * 2.0 * 0.5,
    "another quotient": lambda variable: tf.ones(3) / 1.0,
    "a difference below": lambda v: tf.ones(3) * 1.0 / (tf.sqrt(v) - 1.0),
    "one number above": lambda v: tf.ones(1) * 2.0 / (tf.sqrt(v) + 1.0),
    "a vector below": lambda v: tf.ones(3) * 2.0 / (tf.sqrt(v) + tf.ones(3)),
    "no root below": lambda variable: tf.ones(3) * 2.0 / (tf.ones(3) + 1.0),
    "no variable's root": lambda v: tf.ones(3) * 2.0 / (tf.sqrt(v / 4.0) + 1.0),
    "no product above": lambda v: tf.exp(v * 0.0) / (tf.sqrt(v - 4.0) + 1.0),
}


@pytest.mark.parametrize("value", OTHERS.values(), ids=OTHERS)
def test_other_values_are_written_as_they_are(value):
    def update(optimizer, variable, other):
        optimizer.assign_sub(variable, value(other))
        optimizer.assign_add(variable, value(other))

    assert unfused(update) == [4.0] * 3


def test_a_sparse_value_is_scattered():
    def update(optimizer, variable, other):
        rows = tf.IndexedSlices(tf.constant([1.0]), tf.constant([1]), [3])
        optimizer.assign_sub(variable, rows)

    assert unfused(update) == [4.0, 3.0, 4.0]


@pytest.mark.parametrize("jit_compile", [True, None])
def test_xla_and_eager_steps_are_not_touched(jit_compile, monkeypatch):
    def refuse(*arguments):
        raise AssertionError("nothing to do here")

    monkeypatch.setattr(fused, "_Updates", refuse)
    variable = keras.Variable(np.ones(3, "float32"))
    optimizer = optimizers.LossScaleOptimizer("sgd")
    optimizer.build([variable])
    optimizer.scale_loss(1.0)

    def step():
        optimizer.apply([tf.ones(3)], [variable])

    if jit_compile:
        step = tf.function(step, autograph=False, jit_compile=True)
    step()
    assert int(optimizer.iterations) == 1


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_step_that_is_skipped_writes_nothing(bad):
    weight = keras.Variable(np.ones(3, "float32"))
    optimizer = optimizers.LossScaleOptimizer(keras.optimizers.Adam())
    optimizer.build([weight])
    optimizer.scale_loss(1.0)
    step = tf.function(lambda value: optimizer.apply([value], [weight]))
    before = [np.array(each) for each in (weight, *optimizer.variables[-2:])]
    step(tf.constant([1.0, bad, 1.0]))
    after = [np.array(each) for each in (weight, *optimizer.variables[-2:])]
    for one, two in zip(before, after, strict=True):
        helpers.assert_same_bits(one, two)
    step(tf.ones(3))
    assert int(optimizer.iterations) == 1


def test_fit_learns_as_without(monkeypatch):
    x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")

    def run():
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Dense(16, "tanh"), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        optimizer = optimizers.LossScaleOptimizer(keras.optimizers.AdamW(0.01))
        model.compile(optimizer, "mse", jit_compile=False)
        model.fit(x, x[:, :1] ** 2, 16, 3, shuffle=False, verbose=0)
        return [np.array(each) for each in model.weights], None

    assert_as_without(run, monkeypatch)
