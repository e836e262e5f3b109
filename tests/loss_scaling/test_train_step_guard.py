"""A guarded model's skipped step leaves no trace, in every mode."""

import itertools

import keras
import numpy as np
import pytest

import tfmix
from tests import helpers
from tfmix.loss_scaling import optimizer as optimizers
from tfmix.loss_scaling import rules
from tfmix.loss_scaling import train_step_guard as guards

MODES = {
    "eager": {"run_eagerly": True},
    "graph": {"jit_compile": False},
    "xla": {"jit_compile": True},
}
if keras.backend.backend() == "jax":
    # JAX has no graph without XLA, and eager mode covers that.
    MODES.pop("graph")


@keras.saving.register_keras_serializable(package="tests")
class CountsCalls(keras.layers.Layer):
    """Keeps the user's own state: a float and an integer."""

    def build(self, input_shape):
        self.total = self.add_weight(
            shape=(), initializer="zeros", trainable=False, name="total"
        )
        self.calls = self.add_weight(
            shape=(), initializer="zeros", trainable=False, dtype="int32"
        )

    def call(self, inputs):
        self.total.assign(self.total + keras.ops.sum(inputs))
        self.calls.assign(self.calls + 1)
        return inputs


def make_model(rule="dynamic", **compile_arguments):
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(8),
            CountsCalls(),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(1),
        ]
    )
    wrapped = optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.01), loss_scale=rule
    )
    model.compile(wrapped, loss="mse", metrics=["mae"], **compile_arguments)
    return model


def data(bad_row=None, bad=np.inf):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 4)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    if bad_row is not None:
        x[bad_row] = bad
    return x, y


def without(array, start, stop):
    return np.concatenate([array[:start], array[stop:]])


@pytest.mark.costly
@pytest.mark.parametrize(
    ("mode", "bad"),
    helpers.quick_are(
        {("eager", np.inf), ("graph", np.nan), ("xla", np.inf)},
        itertools.product(MODES, [np.inf, np.nan]),
    ),
)
def test_a_bad_batch_is_as_if_it_had_not_been_there(mode, bad):
    keras.utils.set_random_seed(1)
    guarded = guards.guard(make_model(**MODES[mode]))
    keras.utils.set_random_seed(1)
    oracle = make_model(**MODES[mode])
    fit = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0}
    x, y = data(bad_row=20, bad=bad)
    history = guarded.fit(x, y, **fit).history
    good = [without(array, 16, 32) for array in data()]
    expected = oracle.fit(*good, **fit).history
    for key in ("loss", "mae"):
        helpers.assert_close(history[key], expected[key], "float32")
    for ours, theirs in zip(guarded.weights, oracle.weights, strict=True):
        if ours.name != "calls" and "int" not in ours.dtype:
            helpers.assert_close(ours, theirs, "float32")
    assert guarded.optimizer.skipped_steps == 2


@pytest.mark.costly
def test_without_the_guard_the_same_batch_poisons_the_model():
    model = make_model()
    model.fit(*data(bad_row=20), batch_size=16, verbose=0, shuffle=False)
    with pytest.raises(AssertionError, match="not finite"):
        helpers.assert_all_finite(model.non_trainable_variables)


@pytest.mark.costly
@pytest.mark.parametrize("rule", [64.0, rules.NoLossScale()])
def test_the_guard_works_with_every_rule(rule):
    model = guards.guard(make_model(rule))
    model.fit(*data(bad_row=20), batch_size=16, verbose=0)
    helpers.assert_all_finite(model.non_trainable_variables[:1])
    assert model.optimizer.skipped_steps == 1


@pytest.mark.costly
def test_guarding_twice_and_compiling_again_change_nothing():
    model = make_model()
    model.fit(*data(), batch_size=16, verbose=0)
    assert not guards.is_guarded(model)
    assert guards.guard(guards.guard(model)) is model
    assert guards.is_guarded(model)
    model.fit(*data(bad_row=3), batch_size=16, verbose=0)
    model.compile(optimizers.LossScaleOptimizer("sgd"), loss="mse")
    model.fit(*data(bad_row=3), batch_size=16, verbose=0)
    helpers.assert_all_finite(
        v for v in model.non_trainable_variables if "int" not in v.dtype
    )


@pytest.mark.costly
def test_a_guarded_model_is_saved_and_loaded_like_any_other(tmp_path):
    model = guards.guard(make_model())
    x, y = data()
    model.fit(x, y, batch_size=16, verbose=0)
    saved = model.get_compile_config()
    assert saved["guarded"]["config"] == {"alone": True}
    assert "guarded" not in str(saved["optimizer"])
    model.save(tmp_path / "model.keras")
    # It also loads where tfmix is switched off.
    tfmix.set_global_policy("float32")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    helpers.assert_same_bits(
        loaded.predict(x, verbose=0), model.predict(x, verbose=0)
    )
    assert type(loaded.optimizer) is optimizers.LossScaleOptimizer
    assert guards.is_guarded(loaded)
    assert not guards.is_guarded(make_model())
    loaded.fit(x, y, verbose=0)
    again = keras.models.load_model(tmp_path / "model.keras")
    guards.guard(again).fit(x, y, verbose=0)
    again.compile("adam", loss="mse")
    assert "guarded" not in str(again.get_compile_config())


@pytest.mark.costly
@pytest.mark.parametrize("mode", MODES)
def test_an_epoch_without_an_applied_step_does_not_report_a_loss_of_zero(mode):
    # The loss is finite, but not the gradients: the scale is far too high.
    model = make_model(**MODES[mode])
    rule = rules.DynamicLossScale(2.0**120, max_scale=2.0**120)
    wrapped = optimizers.LossScaleOptimizer("sgd", loss_scale=rule)
    model.compile(wrapped, loss="mse", metrics=["mae"], **MODES[mode])
    guards.guard(model)
    x, y = data()
    y = y * 1e3
    history = model.fit(x, y, batch_size=16, verbose=0).history
    assert wrapped.skipped_steps == 4
    assert 1e5 < history["loss"][0] < 1e8
    assert history["mae"][0] > 1.0


def test_a_model_that_cannot_skip_is_refused_with_what_to_write():
    model = make_model()
    model.compile("adam", loss="mse")
    with pytest.raises(ValueError, match="tfmix.NoLossScale"):
        guards.guard(model)
    with pytest.raises(TypeError, match="model=3"):
        guards.guard(3)
    late = guards.guard(make_model())
    late.compile("adam", loss="mse")
    with pytest.raises(ValueError, match="can be guarded only if"):
        late.fit(*data(), verbose=0)


@pytest.mark.costly
@helpers.requires_backend("tensorflow")
@pytest.mark.parametrize("mode", ["graph", "xla"])
def test_frozen_weights_are_left_alone_and_a_teacher_is_restored(
    mode, monkeypatch
):
    from tfmix._keras import compilation

    asked = {}
    may_be_written = compilation.may_be_written

    def spying(variable):
        asked[id(variable)] = may_be_written(variable)
        return asked[id(variable)]

    monkeypatch.setattr(compilation, "may_be_written", spying)

    class Student(keras.Model):
        """Moves a frozen teacher in its training step."""

        def __init__(self):
            super().__init__()
            self.backbone = keras.layers.Dense(4, name="backbone")
            self.backbone.trainable = False
            self.head = keras.layers.Dense(1, name="head")
            self.teacher = keras.layers.Dense(1, name="teacher")
            self.teacher.trainable = False

        def call(self, x):
            x = self.backbone(x)
            return self.head(x) + 0.0 * self.teacher(x)

        def train_step(self, data):
            logs = super().train_step(data)
            self.teacher.bias.assign(self.teacher.bias + 1.0)
            return logs

    model = Student()
    optimizer = optimizers.LossScaleOptimizer("sgd")
    model.compile(optimizer, loss="mse", **MODES[mode])
    guards.guard(model)
    model.fit(*data(bad_row=20), batch_size=16, verbose=0)
    frozen = [id(variable.value) for variable in model.backbone.variables]
    assert [asked[one] for one in frozen] == [False, False]
    # Four steps, of which one was skipped.
    assert float(model.teacher.bias[0]) == 3.0


@pytest.mark.costly
@helpers.requires_backend("tensorflow")
@pytest.mark.parametrize("mode", MODES)
def test_seeds_move_on_in_a_skipped_step(mode):
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
    )
    wrapped = optimizers.LossScaleOptimizer("sgd")
    model.compile(wrapped, loss="mse", **MODES[mode])
    guards.guard(model)
    (seed,) = model.non_trainable_variables
    x, y = data()
    y[0] = np.inf
    states = [helpers.to_numpy(seed).tolist()]
    for _ in range(2):
        model.train_on_batch(x, y)
        states.append(helpers.to_numpy(seed).tolist())
    assert wrapped.skipped_steps == 2
    assert len(set(map(tuple, states))) == 3


@pytest.mark.costly
@helpers.requires_backend("tensorflow")
@pytest.mark.parametrize("mode", MODES)
def test_states_that_keras_does_not_list_are_as_before(mode):
    import tensorflow as tf

    class Sums(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.total = tf.Variable(0.0, trainable=False)

        def call(self, inputs):
            self.total.assign_add(tf.reduce_sum(inputs))
            return inputs

    gru = keras.layers.GRU(3, stateful=True)
    model = keras.Sequential(
        [keras.Input((2, 4), 16), gru, Sums(), keras.layers.Dense(1)]
    )
    model.compile(
        optimizers.LossScaleOptimizer("adam"), loss="mse", **MODES[mode]
    )
    guards.guard(model)
    x, y = data()
    x = np.stack([x, x], 1)
    model.fit(x[:32], y[:32], batch_size=16, shuffle=False, verbose=0)
    states = [*gru.states, model.layers[1].total]
    before = helpers.snapshot(states)
    x[3] = np.inf
    model.fit(x[:16], y[:16], batch_size=16, verbose=0)
    assert model.optimizer.skipped_steps == 1
    assert all(map(np.any, before))
    helpers.assert_unchanged(states, before)
