"""`compile` wraps the optimizer a 16-bit model needs, and no other."""

import copy
import pickle

import keras
import numpy as np
import pytest

from tests import helpers
from tfmix.autocast import (
    compile_optimizer,
    global_policy,
    interceptor,
    own_code,
)
from tfmix.autocast import model as mixed_model
from tfmix.conversion import convert
from tfmix.loss_scaling import optimizer as scaling
from tfmix.loss_scaling import rules, train_step_guard
from tfmix.optimizers import master_weights
from tfmix.policy import policy as policies

X = np.random.default_rng(3).normal(size=(16, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def make(dtype=None, **kwargs):
    return keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(4, dtype=dtype),
            keras.layers.Dense(1, dtype="float32"),
        ],
        **kwargs,
    )


class Subclassed(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)


def is_wrapped(model):
    return type(model.optimizer) is scaling.LossScaleOptimizer


@pytest.mark.costly
@pytest.mark.parametrize("policy", ["mixed_float16", "O1", "O2", "float16"])
@pytest.mark.parametrize("kind", [make, Subclassed])
def test_a_float16_model_gets_loss_scaling_and_a_guard(policy, kind):
    global_policy.set_global_policy(policy)
    model = kind()
    model.compile("adam", "mse")
    assert is_wrapped(model)
    assert model.optimizer.loss_scale == 2.0**15
    assert train_step_guard.is_guarded(model)


def test_a_bfloat16_model_gets_the_check_and_no_scale():
    global_policy.set_global_policy("mixed_bfloat16")
    model = make()
    model.compile("adam", "mse")
    assert model.optimizer.rule == rules.NoLossScale()
    assert train_step_guard.is_guarded(model)


@pytest.mark.costly
@pytest.mark.parametrize("kind", [make, Subclassed])
def test_a_row_of_nan_leaves_a_bfloat16_model_as_it_was(kind):
    global_policy.set_global_policy("mixed_bfloat16")
    model = kind()
    model.compile("adam", "mse")
    x = X.copy()
    x[3] = np.nan
    model.fit(x, Y, batch_size=4, shuffle=False, verbose=0)
    assert all(np.isfinite(one).all() for one in model.get_weights())
    assert model.optimizer.skipped_steps == 1
    assert int(model.optimizer.iterations) == 3


def test_a_float32_model_gets_none():
    global_policy.set_global_policy("float32")
    model = make()
    model.compile("adam", "mse")
    assert type(model.optimizer) is keras.optimizers.Adam
    assert not train_step_guard.is_guarded(model)


def test_a_map_is_looked_into():
    entry = {"dense": keras.DTypePolicy("mixed_float16")}
    policy = keras.dtype_policies.DTypePolicyMap(
        keras.DTypePolicy("mixed_float16"), entry
    )
    with global_policy.policy_scope(policy):
        model = make()
    model.compile("adam", "mse")
    assert is_wrapped(model)


def test_one_float16_layer_is_enough_while_a_policy_is_on():
    global_policy.set_global_policy("mixed_bfloat16")
    model = make(dtype="mixed_float16")
    model.compile("adam", "mse")
    assert is_wrapped(model)


@pytest.mark.costly
@pytest.mark.parametrize("kind", [make, Subclassed])
def test_a_model_of_a_scope_is_wrapped_after_it(kind):
    with global_policy.policy_scope("mixed_float16"):
        model = kind()
    model.compile("adam", "mse")
    assert is_wrapped(model)
    assert train_step_guard.is_guarded(model)
    assert "compile" not in vars(type(model))
    model.fit(X, Y, verbose=0)
    assert model.optimizer.loss_scale > 0


def test_a_model_made_before_the_policy_is_wrapped_by_it():
    keras.config.set_dtype_policy("mixed_float16")
    model = make()
    global_policy.set_global_policy("mixed_bfloat16")
    model.compile("adam", "mse")
    assert is_wrapped(model)


def of_tfmix(caplog):
    return [text for text in caplog.messages if text.startswith("tfmix: ")]


def made_too_early(caplog):
    return [text for text in caplog.messages if "apply_policy(model" in text]


@pytest.mark.costly
@pytest.mark.parametrize("kind", [make, Subclassed])
def test_a_model_made_before_the_policy_warns_once(kind, caplog):
    model = kind()
    global_policy.set_global_policy("mixed_float16")
    model.compile(scaling.LossScaleOptimizer("adam"), "mse")
    model.fit(X, Y, verbose=0)
    (told,) = made_too_early(caplog)
    assert "no layer of the model computes in 16 bit" in told
    assert "tfmix.apply_policy(model, 'mixed_float16')" in told


@pytest.mark.costly
@pytest.mark.parametrize("kind", [make, Subclassed])
def test_it_does_not_also_warn_of_a_loss_that_needs_no_scale(kind, caplog):
    model = kind()
    global_policy.set_global_policy("mixed_float16")
    model.compile("adam", "mse")
    model.fit(X, Y, verbose=0)
    (told,) = of_tfmix(caplog)
    assert [told] == made_too_early(caplog)


@pytest.mark.costly
def test_a_float32_model_trains_without_a_message_about_a_scale(caplog):
    global_policy.set_global_policy("mixed_float16")
    model = make(dtype="float32")
    model.compile("adam", "mse")
    model.fit(X, Y, verbose=0)
    assert not of_tfmix(caplog)


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_a_model_made_under_the_policy_does_not_warn(dtype, caplog):
    global_policy.set_global_policy("mixed_float16")
    model = make(dtype=dtype)
    model.compile("adam", "mse")
    with global_policy.policy_scope("float32"):
        make().compile("adam", "mse")
    assert not made_too_early(caplog)


def test_a_float32_model_is_left_alone_under_a_float16_policy():
    model = make(dtype="float32")
    global_policy.set_global_policy("mixed_float16")
    other = make(dtype="float32")
    for one in (model, other):
        one.compile("adam", "mse")
        assert type(one.optimizer) is keras.optimizers.Adam


@pytest.mark.costly
@pytest.mark.parametrize("policy", ["mixed_float16", "float16"])
def test_auto_scale_loss_off_is_respected_and_saved(policy, tmp_path):
    global_policy.set_global_policy(policy)
    model = make()
    model.compile("sgd", "mse", auto_scale_loss=False)
    assert type(model.optimizer) is keras.optimizers.SGD
    model.fit(X, Y, verbose=0)
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    assert type(loaded.optimizer) is keras.optimizers.SGD


@pytest.mark.parametrize("policy", ["mixed_float16", "float16"])
def test_scale_settings_that_the_user_did_not_give_are_not_saved(policy):
    with global_policy.policy_scope(policy):
        models = [make(), keras.models.clone_model(make())]
    global_policy.set_global_policy("mixed_float16")
    for model in models:
        for _ in range(2):
            model.compile("sgd", "mse")
            assert is_wrapped(model)
            assert model.get_compile_config()["auto_scale_loss"] is True


def test_the_users_own_loss_scale_optimizer_stays(caplog):
    global_policy.set_global_policy("mixed_float16")
    own = scaling.LossScaleOptimizer("adam", loss_scale=8.0)
    model = make()
    model.compile(own, "mse")
    assert model.optimizer is own
    assert train_step_guard.is_guarded(model)
    assert not of_tfmix(caplog)
    kerass = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    model = make()
    model.compile(kerass, "mse")
    assert model.optimizer is kerass
    (told,) = of_tfmix(caplog)
    assert "Compile with tfmix.LossScaleOptimizer(optimizer." in told


def test_the_users_optimizer_is_the_one_inside():
    global_policy.set_global_policy("mixed_float16")
    adam = keras.optimizers.Adam(0.5)
    model = make()
    model.compile(adam, "mse")
    assert model.optimizer.inner_optimizer is adam


@pytest.mark.costly
def test_a_fixed_loss_scale_factor_becomes_a_fixed_loss_scale():
    global_policy.set_global_policy("mixed_float16")
    adam = keras.optimizers.Adam(loss_scale_factor=1024.0)
    model = make()
    model.compile(adam, "mse")
    assert model.optimizer.rule == rules.FixedLossScale(1024.0)
    assert model.optimizer.inner_optimizer is adam
    model.fit(X, Y, verbose=0)
    assert model.optimizer.loss_scale == 1024.0
    assert np.isfinite(model.get_weights()[0]).all()


@pytest.mark.parametrize(
    ("policy", "scale"),
    [("float16", 2.0**15), ("bfloat16", 1.0), ("O3", 1.0)],
)
def test_16_bit_variables_get_masters(policy, scale):
    global_policy.set_global_policy(policy)
    model = make()
    model.compile(keras.optimizers.Adam(0.01), "mse")
    assert is_wrapped(model)
    assert model.optimizer.loss_scale == scale
    inner = model.optimizer.inner_optimizer
    assert type(inner) is master_weights.MasterWeightOptimizer


@pytest.mark.parametrize("in_scope", [True, False])
def test_an_overridden_compile_is_reached(in_scope):
    class Model(Subclassed):
        def compile(self, optimizer, extra, **kwargs):
            super().compile(optimizer=optimizer, loss="mse", **kwargs)
            self.extra = extra

    with global_policy.policy_scope("mixed_float16"):
        model = Model()
        if in_scope:
            model.compile("sgd", 3)
    if not in_scope:
        model.compile("sgd", extra=3)
    assert is_wrapped(model)
    assert model.extra == 3


def test_rules_hold_for_a_users_own_compile_and_not_for_kerass():
    seen = {}

    @keras.saving.register_keras_serializable("tests")
    class Noting(keras.optimizers.SGD):
        def __init__(self, **kwargs):
            seen["Keras's"] = interceptor.of_caller()
            super().__init__(**kwargs)

    class Model(Subclassed):
        def compile(self, *args, **kwargs):
            seen["own"] = interceptor.of_caller()
            super().compile(*args, **kwargs)

    global_policy.set_global_policy("mixed_float16")
    made_by_keras = keras.optimizers.serialize(Noting())
    model = Model()
    model.compile(made_by_keras, "mse")
    assert is_wrapped(model)
    assert seen == {"own": interceptor.installed(), "Keras's": frozenset()}
    assert interceptor.SIXTEEN_BIT in seen["own"]


def test_a_compile_that_keeps_its_optimizers_elsewhere_still_works():
    class Gan(Subclassed):
        def compile(self, first, second):
            super().compile()
            self.first, self.second = first, second

    with global_policy.policy_scope("mixed_float16"):
        model = Gan()
    model.compile(keras.optimizers.SGD(), keras.optimizers.Adam())
    # `super().compile()` created RMSprop by itself.
    assert is_wrapped(model)
    assert type(model.first) is keras.optimizers.SGD


def test_a_wrong_argument_is_kerass_own_error():
    with global_policy.policy_scope("mixed_float16"):
        model = make()
    with pytest.raises(TypeError, match="no_such_argument"):
        model.compile("adam", no_such_argument=1)


@pytest.mark.costly
def test_the_wrapped_optimizer_is_what_is_saved(tmp_path):
    with global_policy.policy_scope("mixed_float16"):
        model = make()
    model.compile(keras.optimizers.Adam(0.01), "mse")
    model.fit(X, Y, verbose=0)
    model.save(tmp_path / "m.keras")
    for policy in ("float32", "mixed_float16", "mixed_bfloat16"):
        global_policy.set_global_policy(policy)
        loaded = keras.models.load_model(tmp_path / "m.keras")
        assert is_wrapped(loaded), policy
        assert loaded.layers[0].compute_dtype == "float16"
        pairs = zip(
            loaded.optimizer.variables, model.optimizer.variables, strict=True
        )
        for after, before in pairs:
            np.testing.assert_array_equal(after, before)


@pytest.mark.costly
def test_a_float32_model_loads_as_it_was_under_a_float16_policy(tmp_path):
    model = make()
    model.compile("adam", "mse")
    model.fit(X, Y, verbose=0)
    model.save(tmp_path / "m.keras")
    global_policy.set_global_policy("mixed_float16")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    assert type(loaded.optimizer) is keras.optimizers.Adam
    assert {layer.compute_dtype for layer in loaded.layers} == {"float32"}
    assert int(loaded.optimizer.iterations) == 1


@pytest.mark.slow
@pytest.mark.parametrize("copies", [copy.deepcopy, keras.models.clone_model])
def test_copies_of_a_model_train(copies):
    global_policy.set_global_policy("mixed_float16")
    model = make()
    model.compile("adam", "mse")
    model.fit(X, Y, verbose=0)
    twin = copies(model)
    twin.compile("adam", "mse")
    assert is_wrapped(twin)
    twin.fit(X, Y, verbose=0)


def test_the_record_of_a_model_can_be_dropped():
    with global_policy.policy_scope("mixed_float16"):
        model = make()
    before = set(vars(make()))
    assert mixed_model.policy_of(model).name == "mixed_float16"
    mixed_model.set_policy(model, keras.DTypePolicy("float32"))
    assert mixed_model.policy_of(model) is None
    assert not {"compile", "call", "train_step"} & set(vars(model)) - before


@pytest.mark.costly
def test_a_model_of_a_scope_keeps_its_op_rules_after_it():
    class Norm(keras.layers.Layer):
        def call(self, x):
            return keras.ops.norm(x, axis=-1, keepdims=True)

    with global_policy.policy_scope("mixed_float16"):
        model = keras.Sequential([keras.Input((1024,)), Norm()])
    x = np.full((2, 1024), 300.0, "float32")
    result = keras.ops.convert_to_numpy(model(x))
    np.testing.assert_array_equal(result, [[9600.0]] * 2)
    np.testing.assert_array_equal(model.predict(x, verbose=0), result)


@pytest.mark.costly
@pytest.mark.skipif(
    not hasattr(keras.optimizers, "MultiOptimizer"),
    reason="needs keras.optimizers.MultiOptimizer",
)
def test_the_multi_optimizer_is_wrapped_as_a_whole():
    global_policy.set_global_policy("mixed_float16")
    model = make()
    parts = keras.optimizers.OptimizerMap(
        keras.optimizers.SGD(), {".*/bias": keras.optimizers.Adam()}
    )
    model.compile(keras.optimizers.MultiOptimizer(parts), "mse")
    assert is_wrapped(model)
    model.fit(X, Y, verbose=0)
    assert np.isfinite(model.get_weights()[0]).all()


def small_steps(policy, optimizer):
    """Returns the loss after updates too small for 16-bit variables."""
    rng = np.random.default_rng(5)
    with global_policy.policy_scope(policy):
        model = make()
        model.set_weights([rng.normal(size=w.shape) for w in model.weights])
        model.compile(optimizer, "mse")
    for _ in range(40):
        model.train_on_batch(X, Y)
    return model, model.evaluate(X, Y, verbose=0)


@pytest.mark.costly
@pytest.mark.parametrize("policy", ["bfloat16", "float16"])
def test_a_users_loss_scale_optimizer_gets_the_masters_it_lacks(policy):
    own = scaling.LossScaleOptimizer(keras.optimizers.SGD(3e-3))
    model, got = small_steps(policy, own)
    assert model.optimizer is own
    assert type(own.inner_optimizer) is master_weights.MasterWeightOptimizer
    _, expected = small_steps("float32", keras.optimizers.SGD(3e-3))
    _, before = small_steps("float32", keras.optimizers.SGD(0.0))
    assert abs(got - expected) < 0.1 * (before - expected)


def test_masters_that_cannot_be_added_are_requested():
    global_policy.set_global_policy("bfloat16")
    built = scaling.LossScaleOptimizer("sgd")
    built.build([keras.Variable([1.0])])
    kerass = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    for optimizer, state in ((built, "built already"), (kerass, "Keras's own")):
        with pytest.raises(ValueError, match=f"{state}.*MasterWeightOptimizer"):
            make().compile(optimizer, "mse")


def test_the_wrappers_of_tfmix_are_removed_and_the_users_stay():
    global_policy.set_global_policy("float16")
    adam = keras.optimizers.Adam()
    model = make()
    model.compile(adam, "mse")
    assert compile_optimizer.without_automatic(model.optimizer) is adam
    own = scaling.LossScaleOptimizer("adam")
    inside = own.inner_optimizer
    model.compile(own, "mse")
    assert own.inner_optimizer is not inside
    assert compile_optimizer.without_automatic(own) is own
    assert own.inner_optimizer is inside


@pytest.mark.costly
def test_an_optimizer_that_only_the_model_understands_is_passed_on():
    class Task(keras.Model):
        """Compiles itself with "auto", as KerasHub's tasks do."""

        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)
            self.compile(optimizer="auto", loss="auto")

        def call(self, x):
            return self.dense(x)

        def compile(self, optimizer="auto", loss="auto", **kwargs):
            if optimizer == "auto":
                optimizer = keras.optimizers.Adam(5e-5)
            super().compile(optimizer, "mse", **kwargs)

    with global_policy.policy_scope("mixed_float16"):
        model = Task()
    model.compile("auto")
    assert is_wrapped(model)
    assert train_step_guard.is_guarded(model)
    model.fit(X, Y, verbose=0)


@pytest.mark.costly
def test_the_guard_of_compile_gives_way_to_an_optimizer_that_skips_nothing():
    with global_policy.policy_scope("mixed_float16"):
        model = make()
    model.compile("adam", "mse")
    assert train_step_guard.is_guarded(model)
    model.compile("adam", "mse", auto_scale_loss=False)
    history = model.fit(X, Y, verbose=0).history
    assert np.isfinite(history["loss"][0])


@helpers.requires_backend("tensorflow")
def test_a_step_runs_under_the_rules_of_the_last_policy_only(monkeypatch):
    from tfmix.autocast import interceptor

    seen = []
    model = make()
    step = type(model).train_step

    def spying(self, data):
        seen.append({"tanh", "sum"} & interceptor.of_caller())
        return step(self, data)

    monkeypatch.setattr(type(model), "train_step", spying)
    for name in ("tanh", "sum"):
        policy = policies.Policy("mixed_float16", float32_ops=[name])
        mixed_model.set_policy(model, policy)
        model.compile("sgd", "mse", run_eagerly=True)
        model.train_on_batch(X, Y)
    assert seen == [{"tanh"}, {"sum"}]


@pytest.mark.costly
@pytest.mark.parametrize("auto", [True, False])
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_a_loss_scale_around_another_is_refused(policy, auto):
    inner = scaling.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    both = keras.optimizers.LossScaleOptimizer(inner)
    global_policy.set_global_policy(policy)
    model = make()
    with pytest.raises(ValueError, match=r"`compile\(optimizer.inner_opt"):
        model.compile(both, "mse", auto_scale_loss=auto)
    model.compile(both.inner_optimizer, "mse", auto_scale_loss=auto)
    model.fit(X, Y, verbose=0)


@pytest.mark.costly
@pytest.mark.parametrize("policy", ["mixed_float16", "float32"])
def test_a_loaded_model_is_guarded_as_before(policy, tmp_path):
    global_policy.set_global_policy("mixed_float16")
    model = make()
    model.compile("sgd", "mse")
    model.fit(X, Y, verbose=0)
    model.save(tmp_path / "model.keras")
    # A new process, in which no policy was set, starts like this.
    global_policy.set_global_policy(policy)
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert train_step_guard.is_guarded(loaded)
    loaded.fit(X, Y, verbose=0)


def converted():
    model = make()
    convert.apply_policy(model, "mixed_float16")
    return model


def scoped():
    with global_policy.policy_scope("mixed_float16"):
        return make()


def saved_and_loaded(model, tmp_path):
    model.save(tmp_path / "model.keras")
    return keras.saving.load_model(tmp_path / "model.keras")


def around(model, tmp_path):
    inputs = keras.Input((3,))
    return keras.Model(inputs, model(inputs))


def around_a_layer(model, tmp_path):
    features = model.layers[0].output
    last = keras.layers.Dense(1, dtype="float32")
    return keras.Model(model.inputs, last(features))


MADE_FROM_ANOTHER = {
    "wrapped": around,
    "features": around_a_layer,
    "cloned": lambda model, _: keras.models.clone_model(model),
    "loaded": saved_and_loaded,
    "pickled": lambda model, _: pickle.loads(pickle.dumps(model)),
    "deepcopied": lambda model, _: copy.deepcopy(model),
}


@pytest.mark.costly
@pytest.mark.parametrize("how", MADE_FROM_ANOTHER)
@pytest.mark.parametrize("source", [converted, scoped])
def test_models_made_from_a_float16_model_are_scaled_and_guarded(
    source, how, tmp_path
):
    model = MADE_FROM_ANOTHER[how](source(), tmp_path)
    # Unscaled, the loss is far below float16's range.
    model.compile("sgd", lambda y, x: 1e-9 * keras.ops.abs(y - x))
    model.optimizer.learning_rate = 1e9
    model.fit(np.full_like(X, np.nan), Y, verbose=0)
    before = model.get_weights()
    assert all(np.isfinite(each).all() for each in before)
    model.fit(X, Y, verbose=0)
    after = model.get_weights()
    assert any((a != b).any() for a, b in zip(after, before, strict=True))
    assert is_wrapped(model)
    assert train_step_guard.is_guarded(model)


@pytest.mark.costly
def test_a_layer_made_outside_falls_back_where_its_code_needs_it(caplog):
    class Holds(keras.layers.Layer):
        def call(self, x):
            if "float32" not in str(x.dtype):
                raise TypeError("16 bit")
            return x

    scoped()
    model = keras.Sequential([keras.layers.Dense(1), Holds()])
    for layer in model.layers:
        layer.dtype_policy = "mixed_float16"
    model.compile("sgd", "mse")
    model.fit(X, Y, verbose=0)
    assert "(Holds) computes in float32" in caplog.text


def test_float32_leaves_copies_to_keras():
    model = scoped()
    global_policy.set_global_policy("float32")
    twin = keras.models.clone_model(model)
    twin.compile("sgd", "mse")
    assert not is_wrapped(twin)
    assert not train_step_guard.is_guarded(twin)


@pytest.mark.costly
@pytest.mark.parametrize("policy", ["mixed_float16", "float32"])
def test_a_loaded_model_continues_bit_for_bit_under_any_policy(
    policy, tmp_path
):
    global_policy.set_global_policy("mixed_float16")
    model = make()
    model.compile("adam", "mse")
    model.fit(X, Y, verbose=0)
    model.save(tmp_path / "model.keras")
    global_policy.set_global_policy(policy)
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    global_policy.set_global_policy("mixed_float16")
    for each in (model, loaded):
        each.fit(X, Y, epochs=2, verbose=0, shuffle=False)
    pairs = zip(loaded.get_weights(), model.get_weights(), strict=True)
    for found, expected in pairs:
        np.testing.assert_array_equal(found, expected)


class CallsItself(keras.Sequential):
    """A Sequential model by its bases, which computes in its own `call`."""

    def call(self, inputs, **kwargs):
        return 2.0 * super().call(inputs, **kwargs)


def test_a_graph_with_a_call_of_its_own_computes():
    dense = keras.layers.Dense(2)
    plain = keras.Sequential([keras.Input((2,)), dense])
    own = CallsItself([keras.Input((2,)), dense])
    assert own_code.layers_that_compute(plain) == [dense]
    assert own_code.layers_that_compute(own) == [own, dense]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "jit", "run"),
    [
        ("float16", True, "fit"),
        ("bfloat16", False, "fit"),
        ("O2", True, "train_on_batch"),
    ],
)
def test_masters_of_a_model_that_fit_builds_start_from_its_weights(
    policy, jit, run
):
    """Builds masters in `fit`, which XLA once refused under TensorFlow."""
    with global_policy.policy_scope(policy):
        recurrent = keras.layers.RNN(keras.layers.SimpleRNNCell(3))
        model = keras.Sequential([recurrent, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.0), "mse", jit_compile=jit)
    x = np.ones((8, 3, 2), "float32")
    getattr(model, run)(x, np.ones((8, 1), "float32"))
    # A step of length 0 has written the masters back.
    for weight in model.trainable_variables:
        is_bias = "bias" in weight.path
        assert is_bias or np.any(helpers.to_numpy(weight.value))


@pytest.mark.costly
@pytest.mark.filterwarnings("ignore:The model does not have any trainable")
@pytest.mark.parametrize("policy", ["mixed_float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["frozen", "without weights"])
def test_a_model_with_nothing_to_train_fits_as_keras_lets_it(kind, policy):
    with global_policy.policy_scope(policy):
        layer = keras.layers.Dense(1)
        if kind == "without weights":
            layer = keras.layers.Lambda(lambda x: x[:, :1])
        model = keras.Sequential([layer])
    model.trainable = False
    model.compile("adam", "mse")
    x = np.ones((8, 2), "float32")
    (loss,) = model.fit(x, x[:, :1], verbose=0).history["loss"]
    assert np.isfinite(loss)
