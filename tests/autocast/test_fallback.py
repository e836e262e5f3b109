"""A layer that cannot compute in 16 bit uses float32, and reports it."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfmix
from tests import helpers, steps
from tfmix.autocast import layer_calls

X = np.random.default_rng(0).normal(size=(4, 8)).astype("float32")
NAMES = ("mixed_float16", "mixed_bfloat16")


def strict_add(x, y):
    """Adds like raw TensorFlow and `jax.lax`, which refuse two dtypes."""
    if not helpers.ON_JAX:
        import tensorflow as tf

        return tf.add(x, y)
    from jax import lax

    return lax.add(x, y)


@keras.saving.register_keras_serializable("fallback")
class Mixes(layers.Layer):
    """Adds a float32 tensor that it creates in its `call`."""

    calls = 0

    def call(self, x):
        type(self).calls += 1
        return strict_add(x, ops.full(ops.shape(x), 0.25, dtype="float32"))


class MixesAlike(Mixes):
    """Inherits the code that mixes dtypes."""


@keras.saving.register_keras_serializable("fallback")
class Block(layers.Layer):
    """Mixes dtypes in its own code, around a product in an inner layer."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(8)

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        y = self.dense(x)
        return strict_add(y, ops.ones(ops.shape(x), "float32"))


class BlockModel(keras.Model):
    """Does the same, as a model."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(8)

    def call(self, x):
        return strict_add(self.dense(x), ops.ones(ops.shape(x), "float32"))


def warnings_in(caplog):
    return [r.getMessage() for r in caplog.records if "float32" in r.message]


def row_of(name, report):
    (row,) = [row for row in report.rows if row.layer.endswith(name)]
    return row


def functional(*inner):
    return keras.Sequential([keras.Input((8,)), *inner, layers.Dense(1)])


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_that_mixes_dtypes_computes_in_float32(name, caplog):
    with tfmix.policy_scope(name):
        layer = Mixes()
    np.testing.assert_allclose(layer(X), X + 0.25, atol=0.02)
    (warning,) = warnings_in(caplog)
    for part in ("'mixes'", "(Mixes)", "test_fallback.py:", "`return "):
        assert part in warning
    assert 'dtype="float32"' in warning
    assert "x.dtype" in warning


@keras.saving.register_keras_serializable("fallback")
class Outer(layers.Layer):
    """Calls a layer that falls back, and passes on or adds what it returns."""

    def __init__(self, adds=False, **kwargs):
        super().__init__(**kwargs)
        self.adds = adds
        self.first, self.second = layers.Dense(8), Mixes()

    def build(self, shape):
        self.first.build(shape)

    def call(self, x):
        y = self.second(self.first(x))
        return strict_add(x, y) if self.adds else ops.relu(y)

    def get_config(self):
        return {**super().get_config(), "adds": self.adds}


class Cell(layers.Layer):
    """Mixes dtypes as the cell of an RNN."""

    state_size = 8

    def call(self, x, states):
        h = strict_add(x, ops.ones(ops.shape(x), "float32")) + states[0]
        return h, [h]


class Refuses(layers.Layer):
    """Raises an error of any kind for 16-bit numbers."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def call(self, x):
        if helpers.dtype_of(x) != "float32":
            raise self.error("no, thanks")
        return x + 1.0


# The values name a class, and its layers in 16 bit and in float32.
SPREAD = {
    "its own code": (Mixes, [], ["self"]),
    "any error": (lambda: Refuses(RuntimeError), [], ["self"]),
    "a KeyError": (lambda: Refuses(KeyError), [], ["self"]),
    "products inside": (Block, ["dense"], ["self"]),
    "a model": (BlockModel, ["dense"], []),
    "of a float32 user": (lambda: Block(dtype="float32"), ["dense"], ["self"]),
    "a layer inside": (Outer, ["self", "first"], ["second"]),
    # Only code that cannot take float32 falls back, too.
    "both": (lambda: Outer(adds=True), ["first"], ["self", "second"]),
    "a cell": (lambda: layers.RNN(Cell()), [], ["cell"]),
}


@pytest.mark.parametrize("kind", SPREAD)
@pytest.mark.parametrize("name", NAMES)
def test_only_the_layer_whose_code_mixes_dtypes_falls_back(kind, name):
    make, narrow, wide = SPREAD[kind]
    x = np.stack([X] * 3, 1) if kind == "a cell" else X
    with tfmix.policy_scope(name):
        layer = make()
        results = [layer(x) for _ in range(2)]
        assert layers.Dense(1).compute_dtype == name[6:]
    # TensorFlow's eager loop of the layer around a cell stays in 16 bit.
    returned = {helpers.dtype_of(result) for result in results}
    assert returned == {"float32"} or kind == "a cell"
    parts = {**vars(layer), "self": layer}
    assert {parts[part].compute_dtype for part in narrow} <= {name[6:]}
    assert {parts[part].compute_dtype for part in wide} <= {"float32"}


class Doubles(Mixes):
    """Computes in the dtype of its input."""

    def call(self, x):
        type(self).calls += 1
        return x * 2


@pytest.mark.costly
@pytest.mark.parametrize("kind", [Doubles, Mixes])
def test_fit_traces_a_model_as_often_as_in_float32(kind):
    counts = []
    for name in ("float32", "mixed_float16"):
        with tfmix.policy_scope(name):
            model = functional(kind())
        optimizer = tfmix.LossScaleOptimizer("sgd")
        model.compile(optimizer, "mse", jit_compile=False)
        kind.calls = 0
        for _ in range(2):
            model.fit(X, X[:, :1], epochs=2, batch_size=2, verbose=0)
        counts.append(kind.calls)
    assert counts[0] == counts[1] > 0


@helpers.requires_backend("tensorflow")
def test_a_failed_call_leaves_no_loss_behind():
    class Adds(layers.Layer):
        def call(self, x):
            self.add_loss(0.0 * ops.sum(x) + 3.0)
            return strict_add(x, ops.ones(ops.shape(x), "float32"))

    with tfmix.policy_scope("mixed_float16"):
        model = functional(Adds())
    model(X)
    assert [float(loss) for loss in model.losses] == [3.0]


def test_summary_and_report_name_the_layer_that_fell_back():
    with tfmix.policy_scope("mixed_float16"):
        model = functional(Mixes(name="guilty"))
    lines = []
    model.summary(print_fn=lines.append)
    assert "guilty computes in float32: test_fallback.py:" in lines[-1]
    report = tfmix.apply_policy(model, "mixed_float16")
    row = row_of("guilty", report)
    assert row.after == "float32"
    assert "test_fallback.py" in row.why


def test_a_layer_that_fell_back_is_itself_again_after_undo():
    model = functional(Mixes(name="guilty"))
    report = tfmix.apply_policy(model, "mixed_float16")
    model.predict(X, verbose=0)
    assert "guilty" in tfmix.summary(model).notes[0]
    report.undo()
    assert "call" not in vars(model.layers[0])
    assert model.layers[0].dtype_policy.name == "float32"
    assert helpers.dtype_of(model.layers[0](X)) == "float32"


@helpers.requires_backend("tensorflow")
def test_the_warning_names_the_line_that_autograph_copied(caplog):
    import tensorflow as tf

    @tf.function
    def mixes(x):
        return tf.add(x, tf.ones(tf.shape(x)))

    class Calls(layers.Layer):
        def call(self, x):
            return mixes(x)

    with tfmix.policy_scope("mixed_float16"):
        Calls()(X)
    (warning,) = warnings_in(caplog)
    assert "test_fallback.py:" in warning
    line = "return tf.add(x, tf.ones(tf.shape(x)))"
    assert f"`{line}`: TypeError: Input" in warning


class Names(layers.Layer):
    """Raises an error that names the layer, as those of variables do."""

    def call(self, x):
        if helpers.dtype_of(x) != "float32":
            raise TypeError(f"{self.path} cannot")
        return x


def test_a_cause_is_one_line_whatever_its_error_names(caplog):
    for _ in range(2):
        tfmix.set_global_policy("mixed_float16")
        for kind in (Mixes, MixesAlike, Block, Names):
            for name in "ab":
                made = kind(name=name)
                made(X)
                assert made.compute_dtype == "float32"
        found = [w for w in warnings_in(caplog) if "layer '" in w]
        kinds = [w.partition("(")[2].partition(")")[0] for w in found]
        assert kinds == ["Mixes", "Block", "Names"]


class Shares(layers.Layer):
    """Calls a layer that others call, too."""

    def __init__(self, shared, mixes=False, **kwargs):
        super().__init__(**kwargs)
        self.shared, self.mixes = shared, mixes

    def build(self, shape):
        if not self.shared.built:
            self.shared.build(shape)

    def call(self, x):
        y = self.shared(x)
        if self.mixes:
            return strict_add(y, ops.ones(ops.shape(x), "float32"))
        return strict_add(y, x)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("is_last", [True, False])
def test_only_one_of_the_layers_that_share_an_inner_one_falls_back(
    is_last, name, caplog
):
    tfmix.set_global_policy(name)
    shared = layers.Dense(8, name="shared")
    falls, stays = Shares(shared, mixes=True), Shares(shared)
    inputs = keras.Input((8,))
    order = (stays, falls) if is_last else (falls, stays)
    x = shared(inputs)
    model = keras.Model(inputs, [layer(x) for layer in order])
    model.predict(X, verbose=0)
    assert falls.compute_dtype == "float32"
    assert stays.compute_dtype == shared.compute_dtype == name[6:]
    assert helpers.dtype_of(stays(X)) == name[6:]
    (warning,) = warnings_in(caplog)
    assert falls.name in warning


@helpers.requires_backend("tensorflow")
def test_a_train_step_gets_float32_from_the_layers_that_it_calls(caplog):
    import tensorflow as tf

    class Steps(keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden = keras.Sequential([layers.Dense(2), Doubles()])
            self.dense = layers.Dense(1)

        def call(self, x):
            return self.dense(self.hidden(x))

        def train_step(self, data):
            traces.append(1)
            with tf.GradientTape() as tape:
                hidden = tf.add(self.hidden(data), tf.ones((4, 2)))
                total = tf.add(self.dense(hidden), tf.ones((4, 1)))
                loss = tf.reduce_mean(total)
                loss = self.optimizer.scale_loss(loss)
            weights = self.dense.trainable_weights
            self.optimizer.apply(tape.gradient(loss, weights), weights)
            return {"total": loss}

    seen, traces = [], []
    with tfmix.policy_scope("mixed_float16"):
        model = Steps()
    doubles = model.hidden.layers[1]
    call = doubles.call
    doubles.call = lambda x: (seen.append(helpers.dtype_of(x)), call(x))[1]
    model(X)
    model.compile("sgd", jit_compile=False)
    model.fit(X, epochs=3, verbose=0)
    assert len(traces) == 1
    # Between the layers of a model stays 16 bit.
    assert set(seen) == {"float16"}
    assert model.dense.compute_dtype == "float16"
    assert not warnings_in(caplog)


class Averages(layers.Layer):
    """Has its own state, in a layer that mixes dtypes."""

    def __init__(self):
        super().__init__()
        self.norm = layers.BatchNormalization(momentum=0.5, center=False)
        self.seen = keras.metrics.Sum()

    def build(self, shape):
        self.norm.build(shape)
        self.calls = self.add_weight(
            shape=(), initializer="zeros", trainable=False, dtype="int32"
        )

    def call(self, x, training=False):
        self.calls.assign(self.calls + 1)
        self.seen.update_state(ops.ones((1,)))
        y = self.norm(x, training=training)
        return strict_add(y, ops.ones(ops.shape(x), "float32"))


@pytest.mark.costly
@pytest.mark.parametrize("mode", ["eager"] if helpers.ON_JAX else steps.MODES)
def test_only_the_call_in_float32_changes_state(mode):
    with tfmix.policy_scope("mixed_float16"):
        layer = Averages()
    layer.build((4, 8))
    run = steps.compiled(lambda x: layer(x, training=True), mode)
    for calls, mean in ((1, 1.0), (2, 1.5)):
        run(ops.full((4, 8), 2.0))
        assert layer.compute_dtype == "float32"
        np.testing.assert_allclose(layer.norm.moving_mean, mean, rtol=1e-3)
        assert int(layer.calls) == float(layer.seen.result()) == calls


@helpers.requires_backend("tensorflow")
def test_replicas_fall_back_together():
    import tensorflow as tf

    class Counts(layers.Layer):
        def build(self, shape):
            self.calls = self.add_weight(
                shape=(),
                initializer="zeros",
                trainable=False,
                aggregation="only_first_replica",
                autocast=False,
            )

        def call(self, x):
            self.calls.assign(self.calls + 1.0)
            return tf.matmul(x, tf.eye(8))

    strategy = helpers.mirrored_strategy()
    with strategy.scope(), tfmix.policy_scope("mixed_float16"):
        layer = Counts()
        layer.build((4, 8))
    # A replica that sends more assignments than another waits forever.
    step = tf.function(lambda: strategy.run(lambda: layer(tf.ones((4, 8)))))
    step()
    assert layer.compute_dtype == "float32"
    assert layer.calls.numpy() == 1.0


@pytest.mark.costly
@helpers.requires_backend("tensorflow")
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "O3", "converted"])
def test_a_saved_model_needs_no_attempt_in_16_bit(policy, tmp_path, caplog):
    dense = functional(layers.Dense(8))
    dense.export(tmp_path, verbose=False)
    is_new = policy != "converted"
    with tfmix.policy_scope(policy if is_new else "float32"):
        x = layers.Dense(8)(inputs := keras.Input((8,)))
        saved = layers.TFSMLayer(tmp_path, call_endpoint="serve")
        model = keras.Model(inputs, saved(x))
    if not is_new:
        row = tfmix.apply_policy(model, "mixed_float16").rows[-1]
        assert row.why == "a SavedModel has dtypes of its own"
    features = keras.Model(inputs, x).predict(X, verbose=0)
    expected = dense.predict(features, verbose=0)
    np.testing.assert_array_equal(model.predict(X, verbose=0), expected)
    model.compile("sgd", "mse")
    assert np.isfinite(model.train_on_batch(X, X[:, :1]))
    assert not layer_calls.reason(saved)
    assert not warnings_in(caplog)


class Raises(layers.Layer):
    runs = 0

    def __init__(self, inner=None):
        super().__init__()
        self.inner = inner

    def call(self, x):
        if self.inner is not None:
            return self.inner(x) * 2.0
        Raises.runs += 1
        raise TypeError(f"AddV2, run {Raises.runs}, takes float16 with float16")


@pytest.mark.parametrize("depth", [0, 10])
def test_code_that_fails_runs_once_more_however_deep_it_is(depth):
    with tfmix.policy_scope("mixed_float16"):
        layer = Raises()
        for _ in range(depth):
            layer.built = True
            layer = Raises(layer)
    layer.built = True
    Raises.runs = 0
    # The first of the two errors is raised.
    with pytest.raises(TypeError, match="run 1, takes"):
        layer(X)
    assert Raises.runs == 2
    assert layer.compute_dtype == "float16"


# What follows a layer that fell back: `x` is its input, and `y` its result.
FOLLOWING = {
    "nothing": lambda x, y: y,
    "dense": lambda x, y: layers.Dense(4)(y),
    "residual": lambda x, y: layers.Dense(4)(x + y),
    "normalization": lambda x, y: layers.LayerNormalization()(y),
    "float32 residual": lambda x, y: layers.Add(dtype="float32")([x, y]),
    "float32 behind an op": lambda x, y: layers.Dense(4, dtype="float32")(
        x * ops.mean(y, 1, keepdims=True)
    ),
    "outer that adds": lambda x, y: layers.Dense(4)(Outer(adds=True)(x)),
    "block": lambda x, y: Block()(y),
}


@pytest.mark.parametrize("then", FOLLOWING)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("is_set", [True, False])
def test_a_layer_that_fell_back_predicts_the_same_once_loaded(
    is_set, name, then, tmp_path, caplog
):
    with tfmix.policy_scope(name):
        inputs = keras.Input((8,))
        x = layers.Dense(8)(inputs)
        model = keras.Model(inputs, FOLLOWING[then](x, Mixes()(x)))
    before = model.predict(X, verbose=0)
    model.save(tmp_path / "model.keras")
    assert warnings_in(caplog)
    caplog.clear()
    if is_set:
        tfmix.set_global_policy(name)
    loaded = keras.models.load_model(tmp_path / "model.keras")
    # Without the policy, the ops behind a layer compute in their own dtype.
    within = 0.0 if is_set else 0.02
    found = loaded.predict(X, verbose=0)
    np.testing.assert_allclose(found, before, rtol=within, atol=within)
    # The layers return float32 from the start.
    assert not warnings_in(caplog)


STAY = {
    "Dropout": [0.5],
    "AlphaDropout": [0.5],
    "GaussianNoise": [0.5],
    "LSTM": [4],
    "GRU": [4],
    "ConvLSTM1D": [4, 3],
}


@pytest.mark.parametrize("name", STAY)
@pytest.mark.parametrize("policy", NAMES)
def test_a_layer_stays_in_16_bit(name, policy, caplog):
    tfmix.set_global_policy(policy)
    layer = getattr(layers, name)(*STAY[name])
    shape = (2, 5, 6, 3) if name == "ConvLSTM1D" else (2, 5, 3)
    found = layer(np.ones(shape, "float32"), training=True)
    assert helpers.dtype_of(found) == layer.compute_dtype == policy[6:]
    assert not warnings_in(caplog)


def test_a_quotient_by_a_number_is_a_product():
    tfmix.set_global_policy("mixed_float16")
    x = ops.cast(np.ones((2, 3)), "float16")
    for result in (x / 0.7, ops.divide(x, 8)):
        assert helpers.dtype_of(result) == "float16"
    for result in (1 / x, x / x, x / 1e-9):
        assert helpers.dtype_of(result) == "float32"
