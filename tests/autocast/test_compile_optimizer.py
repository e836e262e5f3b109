"""`compile` wraps the optimizer a 16-bit model needs, and no other."""

import copy
import pathlib
import pickle
import tempfile

import keras
import numpy as np
import pytest
from keras import layers, optimizers

import tfmix
from tests import helpers
from tfmix.autocast import interceptor
from tfmix.autocast import model as mixed_model
from tfmix.policy import layer_dtypes

X = np.random.default_rng(3).normal(size=(16, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def sequential(dtype=None):
    last = layers.Dense(1, dtype="float32")
    return keras.Sequential(
        [keras.Input((3,)), layers.Dense(4, dtype=dtype), last]
    )


class Subclassed(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(1)

    def call(self, x):
        return self.dense(x)


class CompilesItself(Subclassed):
    """Compiles itself with "auto", as KerasHub's tasks do."""

    def __init__(self):
        super().__init__()
        self.compile(optimizer="auto", loss="auto")

    def compile(self, optimizer="auto", loss="auto", **kwargs):
        if optimizer == "auto":
            optimizer = "adam"
        super().compile(optimizer, "mse", **kwargs)


class HasItsOwnArguments(Subclassed):
    def compile(self, optimizer, extra, **kwargs):
        super().compile(optimizer=optimizer, **kwargs)
        self.extra = extra


class KeepsItsOptimizersElsewhere(Subclassed):
    def compile(self, first, second, loss):
        super().compile(loss=loss)
        self.first, self.second = first, second


def under(policy, make=sequential, optimizer="adam", *more, **settings):
    """Compiles a model under a global policy."""
    tfmix.set_global_policy(policy)
    model = make()
    model.compile(optimizer, *more, loss="mse", **settings)
    return model


def after(policy, make=sequential, optimizer="adam", *more, **settings):
    """Compiles a model of a scope, outside of it."""
    with tfmix.policy_scope(policy):
        model = make()
    return under("float32", lambda: model, optimizer, *more, **settings)


def before(policy, dtype=None):
    """Compiles a model that was made before the policy was set."""
    model = sequential(dtype)
    return under(policy, lambda: model)


def of_kerass_policy():
    keras.config.set_dtype_policy("mixed_float16")
    model = sequential()
    return under("mixed_bfloat16", lambda: model)


def of_a_map():
    entry = {"dense": keras.DTypePolicy("mixed_float16")}
    policy = keras.dtype_policies.DTypePolicyMap(
        keras.DTypePolicy("mixed_float16"), entry
    )
    return after(policy)


def of_a_multi_optimizer():
    parts = optimizers.OptimizerMap(
        optimizers.SGD(), {".*/bias": optimizers.Adam()}
    )
    many = optimizers.MultiOptimizer(parts)
    return under("mixed_float16", optimizer=many)


def a_copy_under_float32():
    model = of_a_scope()
    return under("float32", lambda: keras.models.clone_model(model))


def compiled_again():
    model = after(F16)
    model.compile("adam", "mse", auto_scale_loss=False)
    return model


def described(optimizer):
    """Names an optimizer and those inside it, with the loss scale."""
    name = type(optimizer).__name__
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is None:
        return name
    text = f"{name}({described(inner)})"
    if type(optimizer) is not tfmix.LossScaleOptimizer:
        return text
    kind = type(optimizer.rule).__name__.removesuffix("LossScale")
    return f"{kind} {optimizer.loss_scale:g} {described(inner)}"


def skips(model):
    """Returns whether a step on NaN leaves the weights; trains a step, too."""
    model.run_eagerly = True
    model.train_on_batch(X, Y)
    weights = model.get_weights()
    model.train_on_batch(np.full_like(X, np.nan), Y)
    left = all(map(np.array_equal, model.get_weights(), weights))
    model.train_on_batch(X, Y)
    assert np.isfinite(model.get_weights()[0]).all() == left
    return left


F16, BF16 = "mixed_float16", "mixed_bfloat16"
SCALED, CHECKED = "Dynamic 32768 Adam", "No 1 Adam"
MASTERS = "Dynamic 32768 MasterWeightOptimizer(Adam)"
MASTERS_CHECKED = "No 1 MasterWeightOptimizer(Adam)"
KERASS = "LossScaleOptimizer(SGD)"
# The values say how a model is compiled, what it then has, and whether it
# skips bad steps.
GIVEN = {
    "mixed_float16": (lambda: under(F16), SCALED, True),
    "O1": (lambda: under("O1"), SCALED, True),
    "O2": (lambda: under("O2"), SCALED, True),
    "float16": (lambda: under("float16"), MASTERS, True),
    "bfloat16": (lambda: under("bfloat16"), MASTERS_CHECKED, True),
    "O3": (lambda: under("O3"), MASTERS_CHECKED, True),
    "mixed_bfloat16": (lambda: under(BF16), CHECKED, True),
    "float32": (lambda: under("float32"), "Adam", False),
    "subclassed": (lambda: under(F16, Subclassed), SCALED, True),
    "subclassed, bfloat16": (lambda: under(BF16, Subclassed), CHECKED, True),
    "after a scope": (lambda: after(F16), SCALED, True),
    "subclassed, after a scope": (lambda: after(F16, Subclassed), SCALED, True),
    "a policy map": (of_a_map, SCALED, True),
    "one float16 layer under bfloat16": (
        lambda: under(BF16, lambda: sequential(F16)),
        SCALED,
        True,
    ),
    "made under Keras's policy": (of_kerass_policy, SCALED, True),
    "made before the policy": (lambda: before(F16), "Adam", False),
    "float32 before the policy": (lambda: before(F16, "float32"), "Adam", 0),
    "float32 under the policy": (
        lambda: under(F16, lambda: sequential("float32")),
        "Adam",
        False,
    ),
    "auto_scale_loss=False": (
        lambda: under(F16, auto_scale_loss=False),
        "Adam",
        True,
    ),
    "auto_scale_loss=False, float16": (
        lambda: under("float16", auto_scale_loss=False),
        "Adam",
        True,
    ),
    "compiled again": (compiled_again, "Adam", True),
    "a copy under float32": (a_copy_under_float32, "Adam", False),
    "a fixed factor": (
        lambda: under(F16, optimizer=optimizers.SGD(loss_scale_factor=64.0)),
        "Fixed 64 SGD",
        True,
    ),
    "the user's scale": (
        lambda: under(F16, optimizer=tfmix.LossScaleOptimizer("sgd", 8.0)),
        "Dynamic 8 SGD",
        True,
    ),
    "the user's scale without masters": (
        lambda: under("float16", optimizer=tfmix.LossScaleOptimizer("adam")),
        MASTERS,
        True,
    ),
    "Keras's scale": (
        lambda: under(
            F16, optimizer=optimizers.LossScaleOptimizer(optimizers.SGD())
        ),
        KERASS,
        True,
    ),
    "compile with arguments of its own": (
        lambda: after(F16, HasItsOwnArguments, "adam", 3),
        SCALED,
        True,
    ),
    "compile in the constructor": (
        lambda: after(F16, CompilesItself, "auto"),
        SCALED,
        True,
    ),
    # `super().compile()` creates RMSprop by itself.
    "optimizers elsewhere": (
        lambda: after(
            F16, KeepsItsOptimizersElsewhere, optimizers.SGD(), "adam"
        ),
        "Dynamic 32768 RMSprop",
        True,
    ),
    "several optimizers": (
        of_a_multi_optimizer,
        "Dynamic 32768 MultiOptimizer",
        True,
    ),
}


@pytest.mark.every_case("each row is a behaviour of its own")
@pytest.mark.parametrize("how", GIVEN)
def test_what_compile_gives(how):
    if how == "several optimizers" and not hasattr(
        optimizers, "MultiOptimizer"
    ):
        pytest.skip("needs keras.optimizers.MultiOptimizer")
    make, expected, skipping = GIVEN[how]
    model = make()
    assert described(model.optimizer) == expected
    assert "compile" not in vars(keras.Sequential)
    assert skips(model) == skipping


def test_the_users_own_objects_stay():
    own, adam = tfmix.LossScaleOptimizer("sgd"), optimizers.Adam()
    assert under("float16", optimizer=own).optimizer is own
    model = under("float16", optimizer=adam)
    assert model.optimizer.inner_optimizer.inner_optimizer is adam
    model = under(F16, KeepsItsOptimizersElsewhere, adam, own)
    assert (model.first, model.second) == (adam, own)
    # Keras would divide by the factor once more.
    fixed = optimizers.SGD(loss_scale_factor=64.0)
    assert under(F16, optimizer=fixed).optimizer.inner_optimizer is fixed
    assert fixed.loss_scale_factor is None


def test_a_wrong_argument_is_kerass_own_error():
    with pytest.raises(TypeError, match="no_such_argument"):
        after(F16, no_such_argument=1)


@pytest.mark.parametrize("auto", [True, False])
@pytest.mark.parametrize("policy", [F16, BF16])
def test_a_loss_scale_around_another_is_refused(policy, auto):
    inner = tfmix.LossScaleOptimizer(optimizers.SGD(0.1))
    both = optimizers.LossScaleOptimizer(inner)
    with pytest.raises(ValueError, match=r"`compile\(optimizer.inner_opt"):
        under(policy, optimizer=both, auto_scale_loss=auto)
    model = under(policy, optimizer=inner, auto_scale_loss=auto)
    assert skips(model)


def test_masters_that_cannot_be_added_are_requested():
    built = tfmix.LossScaleOptimizer("sgd")
    built.build([keras.Variable([1.0])])
    kerass = optimizers.LossScaleOptimizer(optimizers.SGD())
    for optimizer, state in ((built, "built already"), (kerass, "Keras's own")):
        with pytest.raises(ValueError, match=f"{state}.*MasterWeightOptimizer"):
            under("bfloat16", optimizer=optimizer)


def test_scale_settings_that_the_user_did_not_give_are_not_saved():
    for policy in (F16, "float16"):
        model = after(policy)
        for _ in range(2):
            model.compile("sgd", "mse")
            assert model.get_compile_config()["auto_scale_loss"] is True


@pytest.mark.costly
@pytest.mark.parametrize("kind", [sequential, Subclassed])
@pytest.mark.parametrize("scaled", [True, False])
def test_a_model_made_before_the_policy_is_the_only_one_that_warns(
    kind, scaled, caplog
):
    model = kind()
    tfmix.set_global_policy(F16)
    for other in (sequential(), sequential("float32")):
        other.compile("adam", "mse")
    other.fit(X, Y, verbose=0)
    with tfmix.policy_scope("float32"):
        sequential().compile("adam", "mse")
    sequential().compile(tfmix.LossScaleOptimizer("adam", 8.0), "mse")
    assert not of_tfmix(caplog)
    model.compile(tfmix.LossScaleOptimizer("adam") if scaled else "adam", "mse")
    model.fit(X, Y, verbose=0)
    (text,) = of_tfmix(caplog)
    assert "no layer of the model computes in 16 bit" in text
    assert "tfmix.apply_policy(model, 'mixed_float16')" in text


def test_kerass_own_loss_scale_is_named_with_what_to_write(caplog):
    GIVEN["Keras's scale"][0]()
    (text,) = of_tfmix(caplog)
    assert "Compile with tfmix.LossScaleOptimizer(optimizer." in text


def of_tfmix(caplog):
    return [text for text in caplog.messages if text.startswith("tfmix: ")]


def test_rules_hold_for_a_users_own_compile_and_not_for_kerass():
    seen = {}

    @keras.saving.register_keras_serializable("tests")
    class Noting(optimizers.SGD):
        def __init__(self, **kwargs):
            seen["Keras's"] = interceptor.of_caller()
            super().__init__(**kwargs)

    class Model(Subclassed):
        def compile(self, *args, **kwargs):
            seen["own"] = interceptor.of_caller()
            super().compile(*args, **kwargs)

    model = under(F16, Model, optimizers.serialize(Noting()))
    assert described(model.optimizer) == "Dynamic 32768 Noting"
    assert seen == {"own": interceptor.installed(), "Keras's": frozenset()}
    assert interceptor.SIXTEEN_BIT in seen["own"]


@helpers.requires_backend("tensorflow")
def test_a_step_runs_under_the_rules_of_the_last_policy_only(monkeypatch):
    seen = []
    model = sequential()
    step = type(model).train_step

    def spying(self, data):
        seen.append({"tanh", "sum"} & interceptor.of_caller())
        return step(self, data)

    monkeypatch.setattr(type(model), "train_step", spying)
    for name in ("tanh", "sum"):
        policy = tfmix.Policy("mixed_float16", float32_ops=[name])
        mixed_model.set_policy(model, policy)
        model.compile("sgd", "mse", run_eagerly=True)
        model.train_on_batch(X, Y)
    assert seen == [{"tanh"}, {"sum"}]


@pytest.mark.costly
@pytest.mark.parametrize("policy", ["bfloat16", "float16"])
def test_masters_inside_a_users_scale_keep_updates_too_small_for_16_bit(policy):
    def loss_after(policy, optimizer):
        rng = np.random.default_rng(5)
        model = under(policy, optimizer=optimizer)
        model.set_weights([rng.normal(size=w.shape) for w in model.weights])
        for _ in range(40):
            model.train_on_batch(X, Y)
        return model.evaluate(X, Y, verbose=0)

    own = tfmix.LossScaleOptimizer(optimizers.SGD(3e-3))
    found = loss_after(policy, own)
    expected = loss_after("float32", optimizers.SGD(3e-3))
    start = loss_after("float32", optimizers.SGD(0.0))
    assert abs(found - expected) < 0.1 * (start - expected)


def converted():
    model = sequential()
    tfmix.apply_policy(model, F16)
    return model


def of_a_scope():
    with tfmix.policy_scope(F16):
        return sequential()


def saved_and_loaded(model):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "model.keras")
        model.save(path)
        return keras.saving.load_model(path)


def around(model):
    inputs = keras.Input((3,))
    return keras.Model(inputs, model(inputs))


def around_a_layer(model):
    features = model.layers[0].output
    last = layers.Dense(1, dtype="float32")
    return keras.Model(model.inputs[0], last(features))


MADE_FROM_ANOTHER = {
    "wrapped": around,
    "features": around_a_layer,
    "cloned": keras.models.clone_model,
    "loaded": saved_and_loaded,
    "pickled": lambda model: pickle.loads(pickle.dumps(model)),
    "deepcopied": copy.deepcopy,
}


@pytest.mark.parametrize("how", MADE_FROM_ANOTHER)
@pytest.mark.parametrize("source", [converted, of_a_scope])
def test_models_made_from_a_float16_model_are_scaled_and_guarded(source, how):
    model = MADE_FROM_ANOTHER[how](source())
    # Unscaled, the loss is far below float16's range.
    model.compile("sgd", lambda y, x: 1e-9 * keras.ops.abs(y - x))
    model.optimizer.learning_rate = 1e9
    assert described(model.optimizer) == "Dynamic 32768 SGD"
    start = model.get_weights()
    assert skips(model)
    moved = zip(model.get_weights(), start, strict=True)
    assert any((a != b).any() for a, b in moved)


@pytest.mark.costly
@pytest.mark.parametrize("policy", [F16, BF16, "float32"])
def test_a_loaded_model_continues_bit_for_bit_under_any_policy(policy):
    model = under(F16)
    model.fit(X, Y, verbose=0)
    # A new process, in which no policy was set, starts like this.
    tfmix.set_global_policy(policy)
    loaded = saved_and_loaded(model)
    assert described(loaded.optimizer) == SCALED
    assert loaded.layers[0].compute_dtype == "float16"
    for _ in range(2):
        for found, expected in zip(
            [*loaded.variables, *loaded.optimizer.variables],
            [*model.variables, *model.optimizer.variables],
            strict=True,
        ):
            np.testing.assert_array_equal(found, expected)
        for each in (model, loaded):
            each.fit(X, Y, epochs=2, verbose=0, shuffle=False)
    assert skips(loaded)


@pytest.mark.costly
@pytest.mark.parametrize("policy", [F16, "float16", "float32"])
def test_a_plain_optimizer_is_loaded_as_one_under_a_float16_policy(policy):
    model = under(policy, auto_scale_loss=False)
    model.fit(X, Y, verbose=0)
    dtypes = [layer.compute_dtype for layer in model.layers]
    tfmix.set_global_policy(F16)
    loaded = saved_and_loaded(model)
    assert described(loaded.optimizer) == "Adam"
    assert [layer.compute_dtype for layer in loaded.layers] == dtypes
    assert int(loaded.optimizer.iterations) == 1


@pytest.mark.costly
def test_a_layer_made_outside_falls_back_where_its_code_needs_it(caplog):
    class Holds(layers.Layer):
        def call(self, x):
            if "float32" not in str(x.dtype):
                raise TypeError("16 bit")
            return x

    of_a_scope()
    model = keras.Sequential([layers.Dense(1), Holds()])
    for layer in model.layers:
        layer.dtype_policy = F16
    model.compile("sgd", "mse")
    model.fit(X, Y, verbose=0)
    assert "(Holds) computes in float32" in caplog.text


def test_a_graph_with_a_call_of_its_own_computes():
    class CallsItself(keras.Sequential):
        def call(self, inputs, **kwargs):
            return 2.0 * super().call(inputs, **kwargs)

    dense = layers.Dense(2)
    plain = keras.Sequential([keras.Input((2,)), dense])
    own = CallsItself([keras.Input((2,)), dense])
    assert layer_dtypes.layers_that_compute(plain) == [dense]
    assert layer_dtypes.layers_that_compute(own) == [own, dense]


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
    with tfmix.policy_scope(policy):
        recurrent = layers.RNN(layers.SimpleRNNCell(3))
        model = keras.Sequential([recurrent, layers.Dense(1)])
    model.compile(optimizers.SGD(0.0), "mse", jit_compile=jit)
    x = np.ones((8, 3, 2), "float32")
    getattr(model, run)(x, np.ones((8, 1), "float32"))
    # A step of length 0 has written the masters back.
    for weight in model.trainable_variables:
        is_bias = "bias" in weight.path
        assert is_bias or np.any(helpers.to_numpy(weight.value))


@pytest.mark.costly
@pytest.mark.filterwarnings("ignore:The model does not have any trainable")
@pytest.mark.parametrize("policy", [F16, "bfloat16"])
@pytest.mark.parametrize("kind", ["frozen", "without weights"])
def test_a_model_with_nothing_to_train_fits_as_keras_lets_it(kind, policy):
    with tfmix.policy_scope(policy):
        layer = layers.Dense(1)
        if kind == "without weights":
            layer = layers.Lambda(lambda x: x[:, :1])
        model = keras.Sequential([layer])
    model.trainable = False
    model.compile("adam", "mse")
    x = np.ones((8, 2), "float32")
    (loss,) = model.fit(x, x[:, :1], verbose=0).history["loss"]
    assert np.isfinite(loss)
