"""A model that scales its own gradients needs no loss scale outside.

A factor on its loss cancels at the model's border, so an optimizer of its
variables multiplies and divides by 1.
"""

import warnings

import keras
import numpy as np
import pytest

import tfmix

ON_JAX = keras.backend.backend() == "jax"
MODES = ["eager", "jit"] if ON_JAX else ["eager", "graph", "xla"]
POLICIES = ["mixed_float16", "mixed_bfloat16"]


@pytest.fixture(autouse=True)
def nothing_warns():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "The gradients are divided")
        yield


def data():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(64, 8)).astype("float32")
    return x, np.tanh(x @ generator.normal(size=(8, 1))).astype("float32")


def network(policy):
    keras.utils.set_random_seed(0)
    with tfmix.policy_scope(policy):
        return keras.Sequential(
            [
                keras.Input((8,)),
                keras.layers.Dense(16, activation="tanh"),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(1),
            ]
        )


def train(model, optimizer, mode, loop, steps=4):
    """Trains in the user's own loop; returns the weights."""
    x, y = data()

    def loss_of(got):
        loss = keras.ops.mean(keras.ops.square(got - y))
        return optimizer.scale_loss(loss) if "scale" in loop else loss

    def given(grads):
        return (
            optimizer.unscale_gradients(grads) if "unscale" in loop else grads
        )

    known = {"unscaled": True} if "said" in loop else {}
    if ON_JAX:
        _train_on_jax(model, optimizer, mode, (x, loss_of, given, known), steps)
    else:
        import tensorflow as tf

        def step():
            with tf.GradientTape() as tape:
                loss = loss_of(model(x, training=True))
            variables = model.trainable_variables
            grads = given(tape.gradient(loss, variables))
            optimizer.apply(grads, variables, **known)

        if mode != "eager":
            step = tf.function(step, jit_compile=mode == "xla")
        for _ in range(steps):
            step()
    return [np.array(variable) for variable in model.trainable_variables]


def _train_on_jax(model, optimizer, mode, parts, steps):
    import jax

    x, loss_of, given, known = parts
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    groups = (
        model.trainable_variables,
        model.non_trainable_variables,
        optimizer.variables,
    )

    def step(trainable, rest, state):
        mapping = list(zip(optimizer.variables, state, strict=True))

        def loss(trainable):
            got, new = model.stateless_call(trainable, rest, x, training=True)
            with keras.StatelessScope(state_mapping=mapping):
                return loss_of(got), new

        grads, rest_after = jax.grad(loss, has_aux=True)(trainable)
        with keras.StatelessScope(state_mapping=mapping):
            grads = given(grads)
        trainable, state = optimizer.stateless_apply(
            state, grads, trainable, **known
        )
        return trainable, rest_after, state

    step = jax.jit(step) if mode == "jit" else step
    values = [[v.value for v in group] for group in groups]
    for _ in range(steps):
        values = step(*values)
    for group, new in zip(groups, values, strict=True):
        for variable, value in zip(group, new, strict=True):
            variable.assign(value)


def gradients(model, x, loss_of, mode):
    if ON_JAX:
        import jax

        def loss(trainable, rest):
            return loss_of(model.stateless_call(trainable, rest, x)[0])

        slope = jax.grad(loss)
        slope = jax.jit(slope) if mode == "jit" else slope
        groups = model.trainable_variables, model.non_trainable_variables
        return slope(*([v.value for v in group] for group in groups))
    import tensorflow as tf

    def slope():
        with tf.GradientTape() as tape:
            loss = loss_of(model(x, training=True))
        return tape.gradient(loss, model.trainable_variables)

    if mode != "eager":
        slope = tf.function(slope, jit_compile=mode == "xla")
    return slope()


LOOPS = {
    "plain": (),
    "scaled": ("scale",),
    "told": ("scale", "unscale", "said"),
    "divided": ("scale", "unscale"),
    "never_multiplied": ("unscale", "said"),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("built", [True, False])
def test_updates_are_those_of_the_unwrapped_optimizer(
    policy, mode, loop, built
):
    if not built and ("unscale" in LOOPS[loop] and "scale" not in LOOPS[loop]):
        pytest.skip("before the build the contract is Keras's")
    if not built and loop == "divided":
        pytest.skip("before the build the contract is Keras's")
    model = network(policy)
    bare = keras.optimizers.Adam(0.01)
    expected = train(model, bare, mode, ())
    model = network(policy)
    wrapped = tfmix.LossScaleOptimizer(keras.optimizers.Adam(0.01))
    if built:
        wrapped.build(model.trainable_variables)
    for got, value in zip(
        train(model, wrapped, mode, LOOPS[loop]), expected, strict=True
    ):
        np.testing.assert_array_equal(got, value)


@pytest.mark.parametrize("exponent", [-24, -10, 0, 15, 24])
@pytest.mark.parametrize("mode", MODES)
def test_a_scale_outside_changes_no_bit(exponent, mode):
    results = []
    for scale in (1.0, 2.0**exponent):
        model = network("mixed_float16")
        x, y = data()

        def loss_of(got, scale=scale, y=y):
            return scale * keras.ops.mean(keras.ops.square(got - y))

        grads = gradients(model, x, loss_of, mode)
        results.append([np.array(g) / scale for g in grads])
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_old_names_change_nothing(policy):
    model = network(policy)
    optimizer = tfmix.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    optimizer.build(model.trainable_variables)
    grads = [keras.ops.ones(v.shape) for v in model.trainable_variables]
    assert float(optimizer.scale_loss(3.0)) == 3.0
    assert float(optimizer.get_scaled_loss(3.0)) == 3.0
    assert float(optimizer.current_scale()) == 1.0
    for divided in (
        optimizer.unscale_gradients,
        optimizer.get_unscaled_gradients,
    ):
        assert all(np.all(np.array(g) == 1.0) for g in divided(grads))
    # The action of the rule stays visible.
    assert optimizer.loss_scale == 2.0**15


def test_a_variable_of_another_origin_keeps_the_contract_of_keras():
    model = network("mixed_float16")
    free = keras.Variable(np.zeros(1, "float32"))
    optimizer = tfmix.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    optimizer.build([*model.trainable_variables, free])
    assert float(optimizer.scale_loss(1.0)) == 2.0**15


def test_layers_without_a_model_keep_the_contract_of_keras():
    with tfmix.policy_scope("mixed_float16"):
        layer = keras.layers.Dense(1)
    layer.build((None, 8))
    optimizer = tfmix.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    optimizer.build(layer.trainable_variables)
    assert float(optimizer.scale_loss(1.0)) == 2.0**15


def test_sixteen_bit_variables_keep_the_contract_of_keras():
    model = network("float16")
    masters = tfmix.optimizers.MasterWeightOptimizer(keras.optimizers.SGD(0.1))
    optimizer = tfmix.LossScaleOptimizer(masters)
    optimizer.build(model.trainable_variables)
    assert float(optimizer.scale_loss(1.0)) == 2.0**15


def test_an_optimizer_decides_again_when_its_model_is_converted():
    model = network("float32")
    optimizer = tfmix.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    model.compile(optimizer, "mse")
    optimizer.build(model.trainable_variables)
    assert float(optimizer.scale_loss(1.0)) == 2.0**15
    report = tfmix.apply_policy(model, "mixed_float16")
    assert float(model.optimizer.scale_loss(1.0)) == 1.0
    report.undo()
    assert float(model.optimizer.scale_loss(1.0)) == 2.0**15


@pytest.mark.parametrize("kind", ["SGD", "Adam"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("wrapped", [True, False])
def test_a_variable_that_two_networks_share_is_given_both_gradients(
    kind, mode, wrapped
):
    # An actor and a critic on one trunk, whose lists of variables are joined.
    if ON_JAX and mode == "jit":
        pytest.skip("`stateless_apply` takes one gradient for each variable")

    def trained(wrap):
        trunk, head = (keras.Variable(np.ones(3, "float32")) for _ in "ab")
        optimizer = getattr(keras.optimizers, kind)(0.1)
        if wrap:
            optimizer = tfmix.LossScaleOptimizer(optimizer, loss_scale=8.0)

        def step():
            values = np.float32([[1, 2, 3], [0.5, 0.5, 0.5], [-3, 0.1, 2]])
            grads = [keras.ops.convert_to_tensor(value) for value in values]
            variables = [trunk, head, trunk]
            if wrap:
                grads = [optimizer.scale_loss(gradient) for gradient in grads]
            optimizer.apply_gradients(zip(grads, variables, strict=True))

        if mode != "eager":
            import tensorflow as tf

            optimizer.build([trunk, head])
            step = tf.function(step, jit_compile=mode == "xla")
        for _ in range(3):
            step()
        return np.array(trunk)

    expected = trained(False)
    tfmix.set_global_policy("mixed_float16")
    np.testing.assert_allclose(trained(wrapped), expected, rtol=1e-6)


def test_a_bad_gradient_of_a_shared_variable_skips_the_step_and_is_counted():
    trunk, head = (keras.Variable(np.ones(3, "float32")) for _ in "ab")
    optimizer = tfmix.LossScaleOptimizer(keras.optimizers.SGD(0.1), 8.0)
    optimizer.scale_loss(1.0)
    good = keras.ops.ones((3,))
    bad = keras.ops.convert_to_tensor(np.float32([1, np.nan, 1]))
    pairs = [(good, trunk), (good, head), (bad, trunk)]
    optimizer.apply_gradients(pairs)
    assert np.all(np.array(trunk) == 1.0)
    assert np.all(np.array(head) == 1.0)
    assert list(optimizer.overflow_counts.values()) == [1, 0]
