"""An unwrapped optimizer skips steps that are not finite."""

import keras
import numpy as np
import pytest

import tfmix
from tests import helpers
from tfmix.autocast import bare_optimizers

ON_JAX = keras.backend.backend() == "jax"
MODES = ["eager", "jit"] if ON_JAX else ["eager", "graph", "jit"]
START = np.ones((3,), "float32")


def stepper(optimizer, weights, mode):
    """Returns a step of a loop that does not use tfmix."""
    if ON_JAX:
        apply = optimizer.stateless_apply
        if mode == "jit":
            import jax

            apply = jax.jit(apply)

        def stateless(*grads):
            new, state = apply(
                [v.value for v in optimizer.variables],
                [*map(keras.ops.convert_to_tensor, grads)],
                [v.value for v in weights],
            )
            values = zip(
                [*weights, *optimizer.variables], [*new, *state], strict=True
            )
            for variable, value in values:
                variable.assign(value)

        optimizer.build(weights)
        return stateless
    import tensorflow as tf

    def step(*grads):
        optimizer.apply(list(grads), weights)

    if mode == "eager":
        return step
    compiled = tf.function(step, jit_compile=mode == "jit")
    return lambda *grads: compiled(*map(tf.constant, grads))


def state(optimizer, weights):
    return [v.numpy().copy() for v in [*weights, *optimizer.variables]]


# The wrapper of tfmix, the dtype of the weights, and the policy.
KINDS = {
    "keras": (lambda x: x, "float32", "mixed_float16"),
    "keras in bfloat16": (lambda x: x, "float32", "mixed_bfloat16"),
    "8 bits": (
        tfmix.optimizers.LowMemoryOptimizer,
        "float32",
        "mixed_float16",
    ),
    "masters": (
        tfmix.optimizers.MasterWeightOptimizer,
        "float16",
        "float16",
    ),
    "flat": (
        lambda x: tfmix.optimizers.MasterWeightOptimizer(x, flat=True),
        "float16",
        "float16",
    ),
    "split": (
        lambda x: tfmix.optimizers.MasterWeightOptimizer(x, split=True),
        "bfloat16",
        "bfloat16",
    ),
    "rounding": (tfmix.optimizers.BFloat16Optimizer, "bfloat16", "bfloat16"),
}


@pytest.mark.parametrize(
    ("kind", "mode"),
    [(kind, mode) for kind in list(KINDS)[:4] for mode in MODES]
    + [(kind, MODES[1]) for kind in list(KINDS)[4:]],
)
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_bad_step_leaves_no_trace(kind, mode, bad, said):
    wrapper, dtype, policy = KINDS[kind]
    tfmix.set_global_policy(policy)
    weights = [keras.Variable(START, dtype=dtype) for _ in range(2)]
    average = {} if kind == "rounding" else {"use_ema": True}
    optimizer = wrapper(keras.optimizers.Adam(0.1, **average))
    step = stepper(optimizer, weights, mode)
    step(START, 2 * START)
    before = state(optimizer, weights)
    step(START, np.float32([1.0, bad, 1.0]))
    for after, old in zip(state(optimizer, weights), before, strict=True):
        np.testing.assert_array_equal(after, old)
    step(START, START)
    assert int(optimizer.iterations.numpy()) == 2
    assert weights[1].numpy().astype("float32").max() < 0.9
    assert not said


@pytest.mark.costly
@pytest.mark.parametrize("mode", MODES)
def test_a_warning_says_that_16_bit_weights_need_masters(mode, said):
    tfmix.set_global_policy("bfloat16")
    weights = [keras.Variable(START, dtype="bfloat16")]
    step = stepper(keras.optimizers.Adam(0.1), weights, mode)
    step(START)
    step(START)
    (text,) = said
    assert "tfmix.optimizers.MasterWeightOptimizer(Adam(...))" in text


@pytest.mark.costly
@pytest.mark.parametrize("mode", MODES)
def test_good_steps_are_keras_own(mode):
    found = {}
    for policy in ("float32", "mixed_float16"):
        tfmix.set_global_policy(policy)
        weights = [keras.Variable(START)]
        optimizer = keras.optimizers.Adam(0.1, global_clipnorm=0.5)
        step = stepper(optimizer, weights, mode)
        for size in (1.0, 2.0, 3.0):
            step(np.float32([size, 0.0, -size]))
        found[policy] = state(optimizer, weights)
        names = [v.path for v in optimizer.variables]
        assert not any("scale" in name or "skipped" in name for name in names)
    for one, other in zip(*found.values(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.mark.costly
@pytest.mark.parametrize("mode", MODES)
def test_skips_in_a_row_end_with_a_step_that_is_applied(mode):
    tfmix.set_global_policy("mixed_float16")
    weights = [keras.Variable(START), keras.Variable(START)]
    model = keras.Model()
    model.own = keras.optimizers.SGD(0.1)
    step = stepper(model.own, weights, mode)
    counts = []
    for size in (np.nan, np.inf, 1.0, np.nan, 1.0):
        step(START, size * START)
        (skips,) = bare_optimizers.skippers(model)
        counts.append((skips.skipped_steps, skips.consecutive_skips))
    assert counts == [(1, 1), (2, 2), (2, 0), (3, 1), (3, 0)]
    assert [*skips.overflow_counts.values()] == [0, 3]


@helpers.requires_backend("tensorflow")
def test_a_good_eager_step_writes_nothing_that_keras_does_not_write(
    monkeypatch,
):
    # Keras's own tests of sparse gradients forbid it.
    tfmix.set_global_policy("mixed_float16")
    weights = [keras.Variable(START)]
    optimizer = keras.optimizers.SGD(0.1)
    step = stepper(optimizer, weights, "eager")
    step(START)
    kind, written = type(weights[0].value), []
    original = kind.assign

    def assign(variable, *args, **kwargs):
        written.append(variable)
        return original(variable, *args, **kwargs)

    monkeypatch.setattr(kind, "assign", assign)
    step(START)
    assert [v is optimizer.iterations.value for v in written] == [True]


def test_in_float32_keras_applies_every_step():
    weights = [keras.Variable(START)]
    step = stepper(keras.optimizers.SGD(0.1), weights, "eager")
    step(np.float32([np.nan] * 3))
    assert np.isnan(weights[0].numpy()).all()


@pytest.mark.costly
@helpers.requires_backend("tensorflow")
@pytest.mark.parametrize("jit", [False, True])
def test_keras_own_scaler_stays_keras_own(jit):
    import tensorflow as tf

    tfmix.set_global_policy("mixed_float16")
    weight = keras.Variable(START)
    inner = keras.optimizers.SGD(1.0)
    scaler = keras.optimizers.LossScaleOptimizer(inner, initial_scale=4.0)

    @tf.function(jit_compile=jit)
    def step(gradient):
        scaler.apply([gradient], [weight])

    step(4 * START)
    step(np.inf * START)
    np.testing.assert_array_equal(weight.numpy(), START - 1)


@helpers.requires_backend("tensorflow")
@pytest.mark.parametrize("mode", MODES)
def test_rows_that_are_not_finite_are_skipped(mode):
    import tensorflow as tf

    tfmix.set_global_policy("mixed_float16")
    table = keras.Variable(np.ones((5, 2), "float32"))
    optimizer = keras.optimizers.SGD(1.0)

    def step(value):
        values = tf.fill((1, 2), value)
        rows = tf.IndexedSlices(values, tf.constant([3]), tf.constant([5, 2]))
        optimizer.apply([rows], [table])

    if mode != "eager":
        step = tf.function(step, jit_compile=mode == "jit")
    step(tf.constant(1.0))
    step(tf.constant(np.inf, "float32"))
    assert table.numpy()[:, 0].tolist() == [1.0, 1.0, 1.0, 0.0, 1.0]


@helpers.requires_backend("jax")
@pytest.mark.parametrize("mode", MODES)
def test_rows_of_jax_that_are_not_finite_are_skipped(mode):
    import jax
    from jax.experimental import sparse

    tfmix.set_global_policy("mixed_float16")
    table = keras.Variable(np.ones((5, 2), "float32"))
    optimizer = keras.optimizers.SGD(1.0)
    optimizer.build([table])

    def step(value, state, weights):
        # Both values belong to one row, and add up.
        rows = np.array([[3], [3]])
        values = value * np.ones((2, 2), "float32")
        gradient = sparse.BCOO((values, rows), shape=(5, 2))
        return optimizer.stateless_apply(state, [gradient], weights)

    if mode == "jit":
        step = jax.jit(step)
    for value, expected in ((1.0, -1.0), (np.inf, 1.0), (3e38, 1.0)):
        state = [v.value for v in optimizer.variables]
        (new,), _ = step(np.float32(value), state, [table.value])
        assert new[:, 0].tolist() == [1.0, 1.0, 1.0, expected, 1.0]


def branches(mode, step):
    """Returns loops in one function, which step in a branch of it."""
    import tensorflow as tf

    def by_cond(gradients):
        for n in range(4):
            tf.cond(
                gradients[n, 0] > -1.0,
                lambda n=n: step(gradients[n]),
                lambda: None,
            )

    def by_if(gradients):
        for gradient in gradients:
            if tf.reduce_sum(gradient) < 0:
                continue
            step(gradient)

    compiled = tf.function(jit_compile=mode == "jit")
    return {"cond": compiled(by_cond), "if": compiled(by_if)}


@pytest.mark.costly
@helpers.requires_backend("tensorflow")
@pytest.mark.parametrize("kind", ["cond", "if"])
@pytest.mark.parametrize("mode", ["graph", "jit"])
def test_a_bad_step_in_a_branch_is_skipped(mode, kind):
    import tensorflow as tf

    tfmix.set_global_policy("mixed_float16")
    weight = keras.Variable(START)
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build([weight])

    def step(gradient):
        optimizer.apply([gradient], [weight])

    gradients = np.ones((4, 3), "float32")
    gradients[1, 2] = np.inf
    branches(mode, step)[kind](tf.constant(gradients))
    assert int(optimizer.iterations) == 3
    np.testing.assert_allclose(weight.numpy(), START - 0.3, rtol=1e-6)


@helpers.requires_backend("tensorflow")
@pytest.mark.parametrize("is_built", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_a_variable_of_tensorflow_is_stepped_like_one_of_keras(mode, is_built):
    import tensorflow as tf

    tfmix.set_global_policy("mixed_float16")
    weights = [tf.Variable(START), keras.Variable(START)]
    optimizer = keras.optimizers.SGD(0.1)
    if is_built:
        optimizer.build(weights)
    step = stepper(optimizer, weights, mode)
    step(START, START)
    step(np.inf * START, START)
    step(START, START)
    for weight in weights:
        np.testing.assert_allclose(weight.numpy(), START - 0.2, rtol=1e-6)


@helpers.requires_backend("tensorflow")
def test_each_of_several_optimizers_skips_by_itself():
    tfmix.set_global_policy("mixed_float16")
    first, second = keras.Variable(START), keras.Variable(START)
    one, two = keras.optimizers.SGD(1.0), keras.optimizers.SGD(1.0)
    for bad in (1.0, np.nan, 1.0):
        one.apply([bad * START], [first])
        two.apply([START], [second])
    np.testing.assert_array_equal(first.numpy(), START - 2)
    np.testing.assert_array_equal(second.numpy(), START - 3)


@helpers.requires_backend("tensorflow")
def test_a_built_optimizer_may_get_only_gradients():
    tfmix.set_global_policy("mixed_float16")
    weights = [keras.Variable(START), keras.Variable(START)]
    optimizer = keras.optimizers.SGD(1.0)
    optimizer.build(weights)
    optimizer.apply_gradients([(START, weights[1])])
    optimizer.apply([START, START])
    np.testing.assert_array_equal(weights[1].numpy(), START - 2)


def test_a_float32_model_keeps_keras_own_optimizer():
    tfmix.set_global_policy("mixed_float16")
    layer = keras.layers.Dense(1, dtype="float32")
    model = keras.Sequential([keras.Input((3,)), layer])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    x = np.full((4, 3), np.nan, "float32")
    model.fit(x, x[:, :1], verbose=0)
    assert np.isnan(model.get_weights()[0]).all()


class TwoOptimizers(keras.Model):
    """Trains two layers with an optimizer each, like a GAN."""

    def __init__(self):
        super().__init__()
        self.parts = [keras.Sequential([keras.layers.Dense(1)]) for _ in "ab"]

    def compile(self, *optimizers, **kwargs):
        super().compile(**kwargs)
        self.first, self.second = optimizers

    def train_step(self, data):
        import tensorflow as tf

        losses = []
        for part, optimizer in zip(
            self.parts, (self.first, self.second), strict=True
        ):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(part(data)))
            weights = part.trainable_variables
            optimizer.apply(tape.gradient(loss, weights), weights)
            losses.append(loss)
        return {"loss": sum(losses)}


@pytest.mark.costly
@helpers.requires_backend("tensorflow")
@pytest.mark.parametrize("jit", [False, True])
def test_fit_reports_the_steps_that_its_optimizers_skipped(jit, said):
    tfmix.set_global_policy("mixed_float16")
    model = TwoOptimizers()
    x = np.ones((32, 3), "float32")
    for part in model.parts:
        part.build((None, 3))
    model.compile(
        keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.1), jit_compile=jit
    )
    x[:8] = np.inf
    model.fit(x, batch_size=4, shuffle=False, verbose=0)
    assert all(np.isfinite(w).all() for w in model.get_weights())
    (text,) = [line for line in said if "skipped" in line]
    assert "4 of 16 steps" in text


class Around(keras.Model):
    """Stores the optimizer that it is compiled with, like Keras's guides."""

    def __init__(self, steps_own):
        super().__init__()
        self.dense = keras.layers.Dense(2)
        self.steps_own = steps_own

    def compile(self, own, **settings):
        super().compile(optimizer=own, **settings)
        self.own = own

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        import tensorflow as tf

        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
        weights = self.trainable_weights
        optimizer = self.own if self.steps_own else self.optimizer
        optimizer.apply_gradients(
            zip(tape.gradient(loss, weights), weights, strict=True)
        )
        return {"loss": loss}


@pytest.mark.costly
@helpers.requires_backend("tensorflow")
@pytest.mark.parametrize("steps_own", [True, False])
@pytest.mark.parametrize("mode", ["eager", "graph", "jit"])
@pytest.mark.parametrize("policy", ["mixed_float16", "bfloat16"])
def test_the_optimizer_given_to_compile_skips_where_a_step_uses_it_itself(
    policy, mode, steps_own, said
):
    x = np.ones((6, 3), "float32")
    x[3] = np.nan
    tfmix.set_global_policy(policy)
    model = Around(steps_own)
    own = keras.optimizers.Adam(0.1)
    model.compile(own, run_eagerly=mode == "eager", jit_compile=mode == "jit")
    model.fit(x, np.zeros((6, 2)), batch_size=1, epochs=2, verbose=0)
    assert int(own.iterations) == 10
    for weight in model.weights:
        assert np.isfinite(helpers.to_numpy(weight.value)).all()
    assert any("were skipped" in line or "was skipped" in line for line in said)


@helpers.requires_backend("tensorflow")
@pytest.mark.skipif(
    not hasattr(keras.optimizers, "MultiOptimizer"), reason="of Keras 3.15"
)
@pytest.mark.parametrize("mode", MODES)
def test_optimizers_inside_a_wrapped_one_skip_with_it(mode):
    tfmix.set_global_policy("mixed_float16")
    weights = [keras.Variable(START), keras.Variable(START)]
    inside = {id(w): keras.optimizers.SGD(0.1) for w in weights}
    several = keras.optimizers.MultiOptimizer(lambda w: inside[id(w)])
    optimizer = tfmix.LossScaleOptimizer(several, loss_scale=1.0)
    optimizer.build(weights)
    step = stepper(optimizer, weights, mode)
    for first in (START, np.inf * START, START):
        step(first, START)
    for weight in weights:
        np.testing.assert_allclose(weight.numpy(), START - 0.2, rtol=1e-6)
    # Nor are values kept for a second check.
    attributes = {name for inner in inside.values() for name in vars(inner)}
    assert not [name for name in attributes if "skipping" in name]


def test_gradients_before_the_build_are_refused_as_keras_refuses_them():
    optimizer = keras.optimizers.SGD(0.1)
    with (
        tfmix.policy_scope("mixed_float16"),
        pytest.raises(ValueError, match="must already be built"),
    ):
        optimizer.apply([keras.ops.ones(2)])
