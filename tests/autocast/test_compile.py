"""`compile` wraps the optimizer a 16-bit model needs, and no other."""

import functools

import keras
import numpy as np
import pytest
from keras import layers, optimizers

import tfmix
from tests import helpers
from tfmix._keras import context
from tfmix.policy import policy as policies

X = np.random.default_rng(3).normal(size=(16, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def sequential(dtype=None, kind=keras.Sequential):
    last = layers.Dense(1, dtype="float32")
    return kind([keras.Input((3,)), layers.Dense(4, dtype=dtype), last])


class CallsItself(keras.Sequential):
    def call(self, inputs, **kwargs):
        return 2.0 * super().call(inputs, **kwargs)


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


def compiled(model, optimizer="adam", *more, **settings):
    model.compile(optimizer, *more, loss="mse", **settings)
    return model


def under(policy, make=sequential, *optimizer, **settings):
    """Makes and compiles a model under a global policy."""
    tfmix.set_global_policy(policy)
    return compiled(make(), *optimizer, **settings)


def before(policy, model, *optimizer, **settings):
    """Compiles a model that was made before the policy was set."""
    tfmix.set_global_policy(policy)
    return compiled(model, *optimizer, **settings)


def in_scope(make=sequential, policy="mixed_float16"):
    with tfmix.policy_scope(policy):
        return make()


def after(policy, make=sequential, *optimizer, **settings):
    """Compiles a model of a scope, outside of it."""
    model = in_scope(make, policy)
    return before("float32", model, *optimizer, **settings)


def trained(model):
    model.train_on_batch(X, Y)
    return model


def of_a_file():
    return helpers.reloaded(trained(under("float32")))


def by_keras():
    keras.config.set_dtype_policy(F16)
    return sequential()


def of_a_map():
    entry = {"dense": keras.DTypePolicy(F16)}
    return keras.dtype_policies.DTypePolicyMap(keras.DTypePolicy(F16), entry)


def several():
    parts = optimizers.OptimizerMap(
        optimizers.SGD(), {".*/bias": optimizers.Adam()}
    )
    return optimizers.MultiOptimizer(parts)


def kerass():
    return optimizers.LossScaleOptimizer(optimizers.SGD())


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
    weights = trained(model).get_weights()
    model.train_on_batch(np.full_like(X, np.nan), Y)
    left = all(map(np.array_equal, model.get_weights(), weights))
    assert np.isfinite(trained(model).get_weights()[0]).all() == left
    return left


F16, BF16 = "mixed_float16", "mixed_bfloat16"
SCALED, CHECKED = "Dynamic 32768 Adam", "No 1 Adam"
MASTERS = "Dynamic 32768 MasterWeightOptimizer(Adam)"
MASTERS_CHECKED = "No 1 MasterWeightOptimizer(Adam)"
# The values say what the expression has compiled, and whether that skips bad
# steps.
GIVEN = {
    "under(F16)": (SCALED, True),
    "under('O2')": (SCALED, True),
    "under('float16')": (MASTERS, True),
    "under('bfloat16')": (MASTERS_CHECKED, True),
    "under('O3')": (MASTERS_CHECKED, True),
    "under(BF16)": (CHECKED, True),
    "under('float32')": ("Adam", False),
    "under(F16, Subclassed)": (SCALED, True),
    "after(F16)": (SCALED, True),
    "after(of_a_map())": (SCALED, True),
    "under(BF16, lambda: sequential(F16))": (SCALED, True),
    "under(F16, lambda: sequential('float32'))": ("Adam", True),
    "under(F16, lambda: sequential('float32', CallsItself))": (SCALED, True),
    "before(BF16, by_keras())": (SCALED, True),
    # Nothing watches `compile` after "float32" was set.
    "under('float32', by_keras)": ("LossScaleOptimizer(Adam)", True),
    "before(F16, sequential())": ("Adam", True),
    "under(F16, auto_scale_loss=False)": (SCALED, True),
    "of_a_file()": ("Adam", False),
    "under(F16, sequential, optimizers.SGD(loss_scale_factor=64.0))": (
        "Dynamic 32768 SGD",
        True,
    ),
    "under(F16, sequential, tfmix.LossScaleOptimizer('sgd', 8.0))": (
        "Dynamic 8 SGD",
        True,
    ),
    "under('float16', sequential, tfmix.LossScaleOptimizer('adam'))": (
        MASTERS,
        True,
    ),
    # Keras's own scale would scale a loss that needs no scale.
    "under(F16, sequential, kerass())": ("Dynamic 32768 SGD", True),
    "under('float16', sequential, optimizers.LossScaleOptimizer(kerass()))": (
        "Dynamic 32768 MasterWeightOptimizer(SGD)",
        True,
    ),
    "after(F16, HasItsOwnArguments, 'adam', 3)": (SCALED, True),
    "after(F16, CompilesItself, 'auto')": (SCALED, True),
    # `super().compile()` creates RMSprop by itself.
    "after(F16, KeepsItsOptimizersElsewhere, optimizers.SGD(), 'adam')": (
        "Dynamic 32768 RMSprop",
        True,
    ),
    "under(F16, sequential, several())": (
        "Dynamic 32768 MultiOptimizer",
        True,
    ),
}
if not hasattr(optimizers, "MultiOptimizer"):
    del GIVEN["under(F16, sequential, several())"]


@pytest.mark.every_case("each row is a behaviour of its own")
@pytest.mark.parametrize("code", GIVEN)
def test_compile_gives_the_optimizer_of_the_row(code):
    model = eval(code)
    assert (described(model.optimizer), skips(model)) == GIVEN[code]
    assert "compile" not in vars(keras.Sequential)


def test_the_users_own_objects_stay():
    own, adam = tfmix.LossScaleOptimizer("sgd"), optimizers.Adam()
    assert under("float16", sequential, own).optimizer is own
    model = under("float16", sequential, adam)
    assert model.optimizer.inner_optimizer.inner_optimizer is adam
    model = under(F16, KeepsItsOptimizersElsewhere, adam, own)
    assert (model.first, model.second) == (adam, own)


def test_kerass_own_wrapper_goes_where_its_name_is_given_to_ours(monkeypatch):
    # A test harness does that. Keras's `compile` has a reference of its own.
    ours = tfmix.LossScaleOptimizer
    monkeypatch.setattr(optimizers, "LossScaleOptimizer", ours)
    assert described(under(F16).optimizer) == SCALED


def test_a_wrong_argument_raises_kerass_error():
    with pytest.raises(TypeError, match="no_such_argument"):
        after(F16, no_such_argument=1)


def test_a_fixed_factor_that_keras_drops_is_named(said):
    under(F16, sequential, optimizers.SGD(loss_scale_factor=64.0))
    (text,) = said
    assert "loss_scale_factor=64.0" in text


def losses_with_averages(policy, *callbacks):
    keras.utils.set_random_seed(0)
    averaging = optimizers.SGD(use_ema=True)
    model = under(policy, sequential, averaging, jit_compile=False)
    settings = {"epochs": 3, "shuffle": False, "verbose": 0}
    history = model.fit(X, Y, callbacks=[*callbacks], **settings)
    return history.history["loss"]


def test_weights_are_swapped_with_their_averages_in_float32_only():
    swap = functools.partial(keras.callbacks.SwapEMAWeights, swap_on_epoch=True)
    # TensorFlow swaps with sums of the two.
    np.testing.assert_allclose(
        losses_with_averages(F16, swap()), losses_with_averages(F16), rtol=1e-4
    )
    with pytest.raises(ValueError, match="dtype 'float16'.*'mixed_' policy"):
        losses_with_averages("float16", swap())


def test_masters_that_cannot_be_added_are_requested():
    built = tfmix.LossScaleOptimizer("sgd")
    built.build([keras.Variable([1.0])])
    with pytest.raises(
        ValueError, match="built already.*MasterWeightOptimizer"
    ):
        under("bfloat16", sequential, built)


@pytest.mark.costly
@pytest.mark.parametrize("kind", [sequential, Subclassed])
@pytest.mark.parametrize("scaled", [True, False])
def test_a_model_made_before_the_policy_is_the_only_one_that_warns(
    kind, scaled, said
):
    model = kind()
    tfmix.set_global_policy(F16)
    for other in (sequential(), sequential("float32")):
        other.compile("adam", "mse")
    other.fit(X, Y, verbose=0)
    with tfmix.policy_scope("float32"):
        sequential().compile("adam", "mse")
    sequential().compile(tfmix.LossScaleOptimizer("adam", 8.0), "mse")
    assert not said
    model.compile(tfmix.LossScaleOptimizer("adam") if scaled else "adam", "mse")
    model.fit(X, Y, verbose=0)
    (text,) = said
    # The model itself has a `call` of the user's.
    count = 1 if kind is sequential else 2
    assert f"{count} of {count} layers that gain from" in text
    assert "tfmix.apply_policy(model, 'mixed_float16')" in text


def test_rules_hold_for_a_users_own_compile_and_not_for_kerass():
    seen = {}

    @keras.saving.register_keras_serializable("tests")
    class Noting(optimizers.SGD):
        def __init__(self, **kwargs):
            seen["Keras's"] = context.active_rules()
            super().__init__(**kwargs)

    class Model(Subclassed):
        def compile(self, *args, **kwargs):
            seen["own"] = context.active_rules()
            super().compile(*args, **kwargs)

    model = under(F16, Model, optimizers.serialize(Noting()))
    assert described(model.optimizer) == "Dynamic 32768 Noting"
    assert seen == {"own": context.installed.rules, "Keras's": frozenset()}
    assert policies.SIXTEEN_BIT in seen["own"]


@pytest.mark.costly
@pytest.mark.filterwarnings("ignore:The model does not have any trainable")
@pytest.mark.parametrize("policy", [F16, "bfloat16"])
@pytest.mark.parametrize("kind", ["frozen", "without weights"])
def test_fit_accepts_a_model_with_nothing_to_train(kind, policy):
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
