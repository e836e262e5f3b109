"""Shows who multiplies a loss by the scale, and who divides the gradients.

The answer is in the variables: if a model scales their gradients itself, an
optimizer multiplies and divides by 1. If not, `apply` divides by the scale.
"""

import contextlib
import functools
import pathlib
import tempfile
import types

import keras
import numpy as np
import pytest
from keras import ops

import tfmix
from tests import helpers, steps
from tests.steps import MODES
from tfmix.loss_scaling import rules

OLD = "get_unscaled_gradients"
SCALE = 8.0
X = np.ones((4, 3), "float32")
NOT_MULTIPLIED = (
    r"not multiplied.*`scaled = optimizer.scale_loss\(loss\)` inside the tape"
    r".*unscaled=True"
)
# An unexpected warning about gradients that are only divided is an error.
pytestmark = pytest.mark.filterwarnings("error:The gradients are divided")


def array(*values):
    return ops.convert_to_tensor(np.asarray(values, "float32"))


def free(*shape):
    """Returns a variable of no model."""
    return keras.Variable(np.zeros(shape or (1,), "float32"))


def scaler(*variables, inner=None, **settings):
    """Returns an optimizer whose steps are as long as the gradient."""
    settings = settings or {"initial_scale": SCALE}
    inner = inner or keras.optimizers.SGD(1.0)
    made = tfmix.LossScaleOptimizer(inner, **settings)
    if variables:
        made.build(variables)
    return made


def network(policy="mixed_float16"):
    with tfmix.policy_scope(policy):
        return keras.Sequential(
            [
                keras.Input((3,)),
                keras.layers.Dense(2, "tanh"),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(1),
            ]
        )


def with_a_free_variable():
    model = network()
    both = [*model.trainable_variables, free()]
    return types.SimpleNamespace(model=model, trainable_variables=both)


def layer():
    with tfmix.policy_scope("mixed_float16"):
        made = keras.layers.Dense(1)
    made.build((None, 3))
    return made


def compiled():
    model = network()
    model.compile(keras.optimizers.SGD(1.0), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def loaded():
    # A file keeps no guard.
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "m.keras")
        compiled().save(path)
        return keras.saving.load_model(path)


def fitted(mode):
    model = network()
    how = {} if helpers.ON_JAX else {"jit_compile": mode == "xla"}
    model.compile(scaler(), "mse", run_eagerly=mode == "eager", **how)
    model.fit(X, X[:, :1], verbose=0)
    return model


# Each origin of variables, and whether an optimizer scales them.
ORIGINS = {
    "a variable of no model": (free, True),
    "a layer without a model": (layer, True),
    "a model beside a free variable": (with_a_free_variable, True),
    "a float32 model": (lambda: network("float32"), True),
    "16-bit variables": (lambda: network("float16"), True),
    "a float16 model": (network, False),
    "a bfloat16 model": (lambda: network("mixed_bfloat16"), False),
    "a loaded model": (loaded, False),
    "a compiled model": (compiled, False),
} | {
    f"a model fitted in {mode}": (functools.partial(fitted, mode), False)
    for mode in MODES
}


class Loop:
    """A training loop, of which a mode compiles every function apart.

    The gradient of each weight is the number that the loop hands on.
    """

    def __init__(self, owner, mode, **settings):
        self.owner, self.mode = owner, mode
        self.weights = getattr(owner, "trainable_variables", [owner])
        self.optimizer = getattr(owner, "optimizer", None)
        if self.optimizer is None:
            inner = keras.optimizers.SGD(1.0)
            if self.weights[0].dtype == "float16":
                inner = tfmix.optimizers.MasterWeightOptimizer(inner)
            self.optimizer = scaler(inner=inner, **settings)
        self.back_to_zero()
        self.optimizer.build(self.weights)
        self.calls = {
            "scale": self.compiled("scale_loss"),
            "unscale": self.compiled("unscale_gradients"),
            "apply": self.compiled("apply"),
            "apply_unscaled": self.compiled("apply", unscaled=True),
            "get_scaled": self.compiled("get_scaled_loss"),
            # What pairs are taken for is decided when these are traced.
            "traced": lambda name, g: self.compiled(name)(g),
            "get_unscaled": lambda g: self.compiled(OLD)(g),
            "apply_pairs": lambda g: self.compiled("apply_gradients")(g),
            "clip": lambda g: ops.clip(g, -1.5, 1.5),
        }

    def run(self, code, gradient=2.0):
        """Runs a line of a loop; returns how far it moves every weight."""
        (gradient,) = array(gradient)
        result = eval(code, {"g": gradient, **self.calls})
        values = [np.array(w, "float32").ravel() for w in self.weights]
        self.back_to_zero()
        (moved,) = {-float(value) for value in np.concatenate(values)}
        return moved if result is None else float(result)

    def back_to_zero(self):
        for weight in self.weights:
            weight.assign(ops.zeros(weight.shape))

    def compiled(self, name, **how):
        method = getattr(self.optimizer, name)

        def function(number):
            if name.endswith("loss"):
                return method(number)
            grads = [ops.broadcast_to(number, w.shape) for w in self.weights]
            if name == "apply_gradients":
                method(zip(grads, self.weights, strict=True))
            elif name == "apply":
                method(grads, self.weights, **how)
            else:
                return ops.reshape(method(grads)[0], (-1,))[0]

        return compiled_in(self.mode, function, self)


def compiled_in(mode, function, loop):
    """Compiles a function that may assign a loop's variables."""
    if mode == "eager":
        return function
    if not helpers.ON_JAX:
        return steps.compiled(function, mode)
    import jax

    variables = [*loop.weights, *loop.optimizer.variables]

    @jax.jit
    def pure(values, argument):
        mapping = list(zip(variables, values, strict=True))
        with keras.StatelessScope(state_mapping=mapping) as scope:
            result = function(argument)
        return result, [scope.get_current_value(v) for v in variables]

    def run(argument):
        result, values = pure([v.value for v in variables], argument)
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
        return result

    return run


# The keys say what a loop calls for a loss whose gradient is 2, the values how
# far that moves a weight: if the optimizer scales by 8, and if it does not. The
# order is part of the test: no line decides for a later one.
LINES = {
    "apply(g)": (0.25, 2.0),
    "apply_unscaled(g)": (2.0, 2.0),
    "apply(scale(g))": (2.0, 2.0),
    "apply(scale(scale(g) / 2))": (8.0, 1.0),
    "apply_unscaled(unscale(scale(g)))": (2.0, 2.0),
    "apply_unscaled(clip(unscale(scale(g))))": (1.5, 1.5),
    "[unscale(s := scale(g)), apply(s), apply(s), unscale(s)][1]": (4.0, 4.0),
    "[apply(scale(g)), apply(scale(g / 2))][1]": (3.0, 3.0),
    "apply(scale(g) + scale(g))": (4.0, 4.0),
    "apply(unscale(scale(g)))": (0.25, 2.0),
    "apply_unscaled(unscale(g))": (0.25, 2.0),
    "apply_unscaled(scale(g))": (16.0, 2.0),
    "apply_pairs(clip(get_unscaled(get_scaled(g))))": (1.5, 1.5),
    "apply_pairs(traced('scale_loss', g))": (2.0, 2.0),
    "unscale(scale(g))": (2.0, 2.0),
    "apply(scale(g)) ": (2.0, 2.0),
    "apply(g) ": (0.25, 2.0),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("origin", ORIGINS)
def test_what_a_loop_calls_and_where_its_variables_are_from_decide(
    origin, mode
):
    make, scales = ORIGINS[origin]
    loop = Loop(make(), mode)
    first = loop.optimizer.loss_scale
    warned = contextlib.nullcontext()
    if scales:
        warned = pytest.warns(UserWarning, match=NOT_MULTIPLIED)
    with warned:
        loop.run("apply(g)")
    found = {line: loop.run(line) for line in LINES}
    assert found == {line: of[not scales] for line, of in LINES.items()}
    factor = SCALE if scales else 1.0
    assert float(loop.optimizer.scale_loss(1.0)) == factor
    # A model's optimizer still shows what its rule does.
    assert loop.optimizer.loss_scale == first > 1.0
    assert loop.optimizer.skipped_steps == 0


@pytest.mark.parametrize("scale", [rules.NoLossScale(), 1.0])
def test_without_a_loss_scale_there_is_nothing_to_forget(scale):
    assert Loop(free(), "eager", loss_scale=scale).run("apply(g)") == 2.0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("make", "factors"), [(free, (8, 4)), (network, (1,))])
def test_a_function_of_the_loss_is_scaled_as_in_tf_keras(make, factors, mode):
    loop = Loop(make(), mode)
    function = loop.optimizer.get_scaled_loss(lambda: array(3.0))
    scaled = compiled_in(mode, lambda _: function(), loop)
    for factor in factors:
        loop.optimizer.loss_scale = max(factor, 2.0)
        assert float(scaled(array(0.0))[0]) == 3.0 * factor


@pytest.mark.parametrize("model_scales", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
def test_a_loss_may_be_scaled_before_the_optimizer_knows_its_variables(
    scaled, model_scales
):
    if not scaled and not model_scales:
        pytest.skip("its gradients would be divided only")
    model = network("mixed_float16" if model_scales else "float32")
    optimizer, weights = scaler(), model.trainable_variables
    before = helpers.snapshot(weights)
    for _ in range(2):
        one = optimizer.scale_loss(1.0) if scaled else 1.0
        optimizer.apply([ops.full(w.shape, one) for w in weights], weights)
    for old, new in zip(before, weights, strict=True):
        np.testing.assert_array_equal(new, old - 1.0 - 1.0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_clipping_hides_no_infinity_and_the_scale_is_the_live_one(mode, bad):
    loop = Loop(free(), mode)
    # An unscaling without a step does not touch the next one.
    assert np.isnan(loop.run("unscale(scale(g))", bad))
    assert loop.run("apply(scale(g))") == 2.0
    assert loop.optimizer.skipped_steps == 0
    for skips, line in enumerate(
        [
            "apply_unscaled(clip(unscale(scale(g))))",
            "apply_pairs(clip(get_unscaled(scale(g))))",
        ],
        1,
    ):
        assert loop.run(line, bad) == 0.0
        assert not bool(loop.optimizer.last_step_applied())
        assert list(loop.optimizer.overflow_counts.values()) == [skips]
        assert loop.optimizer.skipped_steps == skips
        assert loop.optimizer.loss_scale == SCALE / 2**skips
    assert loop.run("apply(scale(g))") == 2.0
    assert bool(loop.optimizer.last_step_applied())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scale", [2.0**-10, 1.0])
def test_unscaled_gradients_are_checked_unchanged_at_any_scale(mode, scale):
    rule = rules.DynamicLossScale(initial_scale=scale, min_scale=scale)
    loop = Loop(free(), mode, loss_scale=rule)
    # It is finite, but divided by such a scale it would not be.
    assert loop.run("apply_unscaled(g)", 1e38) > 9e37


@pytest.mark.parametrize("bad", range(6))
def test_each_gradient_is_divided_and_blamed_at_its_own_place(bad):
    shapes = [(3, 2), (2,), (3, 2), (), (2,), (3, 2)]
    weights = [free(*shape) if shape else free() for shape in shapes]
    optimizer = scaler(*weights)
    optimizer.scale_loss(1.0)
    random = np.random.default_rng(0)
    values = [np.float32(random.normal(size=w.shape)) for w in weights]
    values[bad].flat[0] = np.inf
    grads = [ops.convert_to_tensor(value) for value in values]
    grads[(bad + 1) % 6] = None
    for value, true in zip(
        values, optimizer.unscale_gradients(grads), strict=True
    ):
        if true is not None:
            expected = np.where(np.isinf(value), np.nan, value / 8)
            np.testing.assert_array_equal(true, expected)
    # The variables of a step may be some of them, in any order.
    rows = [row for row in (5, 2, 0, 3, 1, 4) if grads[row] is not None]
    optimizer.apply([grads[n] for n in rows], [weights[n] for n in rows])
    assert list(optimizer.overflow_counts.values()) == [
        int(row == bad) for row in range(6)
    ]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_losses_of_any_structure_are_scaled_in_float32(dtype):
    optimizer = tfmix.LossScaleOptimizer("sgd")
    loss = ops.cast(3.0, dtype)
    scaled = optimizer.scale_loss({"a": loss, "b": [1.0]})
    assert keras.backend.standardize_dtype(scaled["a"].dtype) == "float32"
    assert float(scaled["a"]) == 98304.0
    assert float(scaled["b"][0]) == 2.0**15
    # It is not built, so it knows no variables.
    assert float(optimizer.unscale_gradients([scaled["a"]])[0]) == 3.0
    assert optimizer.overflow_counts == {}


def test_a_value_that_overwrites_its_variable_is_neither_scaled_nor_divided():
    weight, amax = free(), free()
    amax.overwrite_with_gradient = True
    optimizer = scaler(weight, amax)
    both = [optimizer.scale_loss(array(2.0)), array(3.0)]
    unscaled = optimizer.unscale_gradients(both)
    assert [float(each[0]) for each in unscaled] == [2.0, 3.0]
    optimizer.apply(both, [weight, amax])
    optimizer.apply(unscaled, [weight, amax], unscaled=True)
    assert (weight.numpy(), amax.numpy()) == (-4.0, 3.0)


def test_an_optimizer_decides_again_when_its_model_is_converted():
    model = network("float32")
    model.compile(scaler(), "mse")
    model.optimizer.build(model.trainable_variables)
    assert float(model.optimizer.scale_loss(1.0)) == SCALE
    report = tfmix.apply_policy(model, "mixed_float16")
    assert float(model.optimizer.scale_loss(1.0)) == 1.0
    report.undo()
    assert float(model.optimizer.scale_loss(1.0)) == SCALE


@pytest.mark.parametrize("mode", MODES)
def test_the_scale_can_be_read_in_a_compiled_function(mode):
    loop = Loop(free(), mode)
    read = compiled_in(mode, lambda x: x * loop.optimizer.loss_scale, loop)
    assert float(read(array(2.0)[0])) == 2 * SCALE
    loop.optimizer.loss_scale = 4.0
    assert float(read(array(2.0)[0])) == 8.0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "read",
    [
        lambda optimizer: optimizer.skipped_steps,
        lambda optimizer: optimizer.consecutive_skips,
        lambda optimizer: list(optimizer.overflow_counts.values()),
        lambda optimizer: optimizer.check_health(),
    ],
    ids=["skipped_steps", "consecutive_skips", "overflow_counts", "health"],
)
def test_numbers_of_the_host_are_refused_in_a_compiled_function(mode, read):
    loop = Loop(free(), mode)
    if mode == "eager":
        read(loop.optimizer)
        return
    counts = [compiled_in(mode, lambda _: read(loop.optimizer), loop)]
    if helpers.ON_JAX:
        # JAX can count without a scope, too.
        counts.append(steps.compiled(lambda _: read(loop.optimizer), mode))
    for count in counts:
        with pytest.raises(ValueError, match="outside the compiled function"):
            count(array(2.0)[0])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("wrapped", [True, False])
def test_a_variable_that_two_networks_share_gets_both_gradients(mode, wrapped):
    # An actor and a critic share a trunk, and their lists are joined.
    if helpers.ON_JAX and mode == "jit":
        pytest.skip("`stateless_apply` takes one gradient for each variable")

    def trained(wrap):
        trunk, head = free(3), free(3)
        optimizer = keras.optimizers.Adam(0.1)
        if wrap:
            optimizer = scaler(inner=optimizer)
        optimizer.build([trunk, head])
        values = np.float32([[1, 2, 3], [0.5, 0.5, 0.5], [-3, 0.1, 2]])

        def step():
            grads = list(map(ops.convert_to_tensor, values))
            if wrap:
                grads = optimizer.scale_loss(grads)
            pairs = zip(grads, [trunk, head, trunk], strict=True)
            optimizer.apply_gradients(pairs)

        step = steps.compiled(step, mode)
        for _ in range(3):
            step()
        return trunk.numpy()

    expected = trained(False)
    tfmix.set_global_policy("mixed_float16")
    np.testing.assert_allclose(trained(wrapped), expected, rtol=1e-6)


def test_a_bad_gradient_of_a_shared_variable_skips_the_step_and_is_counted():
    trunk, head = free(3), free(3)
    optimizer = scaler(trunk, head)
    good, bad = optimizer.scale_loss([array(1, 1, 1), array(1, np.nan, 1)])
    pairs = [(good, trunk), (good, head), (bad, trunk)]
    optimizer.apply_gradients(pairs)
    assert not np.any([trunk, head])
    assert list(optimizer.overflow_counts.values()) == [1, 0]


@helpers.requires_backend("tensorflow")
class TestTensorFlow:
    def test_a_step_that_accumulates_in_a_branch_is_of_the_loss_around_it(self):
        import tensorflow as tf

        weight = free()
        optimizer = scaler(weight)

        @tf.function
        def step(due):
            scaled = optimizer.scale_loss(tf.constant([2.0]))
            return tf.cond(
                due, lambda: optimizer.apply([scaled], [weight]), lambda: None
            )

        step(tf.constant(False))
        step(tf.constant(True))
        assert weight.numpy() == -2.0

    def test_sparse_gradients_are_summed_divided_and_checked_in_float32(self):
        import tensorflow as tf

        table = free(6, 1)
        optimizer = scaler(table)
        optimizer.scale_loss(1.0)

        def gradient(*values):
            values = tf.constant(values, tf.float16)[:, None]
            rows = tf.constant([1, 1, 3])
            return [tf.IndexedSlices(values, rows, tf.constant([6, 1]))]

        (true,) = optimizer.unscale_gradients(gradient(8, 16, np.inf))
        assert true.values.dtype == tf.float32
        assert str(true.values.numpy().ravel().tolist()) == "[1.0, 2.0, nan]"
        optimizer.apply(gradient(1, 1, np.inf), [table])
        assert (optimizer.skipped_steps, np.any(table)) == (1, False)
        # Float16 cannot hold the sum of the two values of one row.
        optimizer.apply(gradient(64000, 64000, 4), [table])
        assert table.numpy().ravel().tolist() == [0, -32000, 0, -1, 0, 0]


@pytest.mark.parametrize(("last", "scale"), [(1.0, 2.0**14), (np.nan, 2.0**15)])
def test_a_clip_by_value_hides_no_overflow_inside_a_model(last, scale):
    with tfmix.policy_scope("mixed_float16"):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    optimizer = scaler(*model.trainable_variables, initial_scale=2.0**15)
    before = model.get_weights()
    grads = [array([np.inf], [1.0], [1.0]), array(last)]
    true = optimizer.unscale_gradients(grads)
    clipped = [ops.clip(gradient, -1.0, 1.0) for gradient in true]
    optimizer.apply(clipped, model.trainable_variables, unscaled=True)
    assert optimizer.skipped_steps == 1
    assert all(map(np.array_equal, model.get_weights(), before))
    # Only bad data leaves no gradient finite. Then no scale would help.
    assert optimizer.loss_scale == scale


@helpers.requires_backend("jax")
class TestJax:
    CALLS = (
        lambda optimizer, value: optimizer.scale_loss(value),
        lambda optimizer, value: optimizer.get_scaled_loss(value),
        lambda optimizer, value: optimizer.unscale_gradients([value]),
        lambda optimizer, value: value * optimizer.loss_scale,
        lambda optimizer, value: optimizer.apply([value]),
        lambda optimizer, value: optimizer.inner_optimizer.apply([value]),
    )

    @pytest.mark.parametrize("call", CALLS)
    def test_a_value_that_would_become_a_constant_is_refused(self, call):
        import jax

        tfmix.set_global_policy("mixed_float16")
        weight = free()
        optimizer = scaler(weight)
        optimizer.scale_loss(1.0)
        message = "StatelessScope|stateless_apply"
        with pytest.raises(ValueError, match=message):
            jax.jit(lambda value: call(optimizer, value))(array(1.0))
        with keras.StatelessScope([(weight, array(1.0))]):
            # A scope with values of other variables does not help.
            with pytest.raises(ValueError, match=message):
                jax.jit(lambda value: call(optimizer, value))(array(1.0))
        call(optimizer, array(1.0))

    @pytest.mark.parametrize("rule", [8.0, rules.NoLossScale()])
    def test_a_scale_that_never_changes_may_become_a_constant(self, rule):
        import jax

        optimizer = scaler(loss_scale=rule)
        scaled = jax.jit(optimizer.scale_loss)(array(1.0))
        assert float(scaled[0]) == optimizer.loss_scale

    @pytest.mark.parametrize("mode", MODES)
    def test_stateless_apply_needs_no_scope_but_a_built_optimizer(self, mode):
        import jax

        weight, optimizer = free(), scaler()
        with pytest.raises(ValueError, match="must be built"):
            optimizer.stateless_apply([], [], [])
        optimizer.build([weight])

        def step(weights, state, factor):
            mapping = list(zip(optimizer.variables, state, strict=True))

            def loss(weights):
                with keras.StatelessScope(state_mapping=mapping):
                    return optimizer.scale_loss(factor * weights[0][0])

            slopes = jax.grad(loss)(weights)
            return optimizer.stateless_apply(state, slopes, weights)

        step = jax.jit(step) if mode == "jit" else step
        weights, state = [
            [v.value for v in vs] for vs in ([weight], optimizer.variables)
        ]
        for factor in [np.inf, np.nan, -np.inf, 1.0]:
            weights, state = step(weights, state, factor)
        assert float(weights[0][0]) == -1.0
