"""Hooks of others on Keras's classes work under a policy as without tfmix."""

import copy
import functools
import inspect
import pickle

import keras
import numpy as np
import pytest

import tfmix
from tests import helpers

X = np.random.default_rng(5).normal(size=(16, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
POLICIES = ["mixed_float16", "mixed_bfloat16"]
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*Layer 'dense.*' looks like it has unbuilt:UserWarning"
)


# Each takes the method that it replaces, and a list for what it has seen.
def adds_a_callback(fit, seen):
    def hook(self, *args, **kwargs):
        note = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: seen.append(epoch)
        )
        callbacks = [*(kwargs.pop("callbacks", None) or []), note]
        return fit(self, *args, callbacks=callbacks, **kwargs)

    return hook


def names_three(fit, seen):
    def hook(self, x, y, epochs=1):
        return fit(self, x, y, epochs=epochs, verbose=0, shuffle=False)

    return hook


def binds_the_call(fit, seen):
    """A patch that is safe hands on what it has bound, defaults included."""
    signature = inspect.signature(fit)

    def hook(self, *args, **kwargs):
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        seen.append(bound.arguments.get("epochs"))
        return fit(*bound.args, **bound.kwargs)

    return hook


def sets_the_loss(compile, seen):
    def hook(self, *args, **kwargs):
        kwargs["loss"] = "mae"
        return compile(self, *args, **kwargs)

    return hook


def compiles_three(compile, seen):
    def hook(self, optimizer, loss=None, metrics=None):
        seen.append((type(optimizer).__name__, loss))
        return compile(self, optimizer=optimizer, loss=loss, metrics=metrics)

    return hook


# Each with the method that it replaces, and the arguments of `fit`.
HOOKS = {
    adds_a_callback: ("fit", {"epochs": 2}),
    names_three: ("fit", {"epochs": 2}),
    binds_the_call: ("fit", {"batch_size": 4, "epochs": 2}),
    sets_the_loss: ("compile", None),
    compiles_three: ("compile", None),
}


def counts(method, seen):
    """Profilers and loggers of gradients count calls, or store tensors."""

    def hook(self, *args, **kwargs):
        seen.append(type(self).__name__)
        return method(self, *args, **kwargs)

    return hook


def network():
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(4, "tanh"),
            keras.layers.Dense(1),
            tfmix.float32_output(),
        ]
    )


def trained(model, fit=None):
    """Trains a model; returns its history and its weights."""
    model.compile(keras.optimizers.SGD(0.1), loss="mse")
    # Hooks see the same calls, and TensorFlow takes longer to trace a step
    # than to run the few of a test.
    model.run_eagerly = not helpers.ON_JAX
    settings = {"verbose": 0, "shuffle": False} if fit is None else fit
    history = model.fit(X, Y, **settings).history
    return history, model.get_weights()


def hooked(hook, of, name, when, policy, wraps=False, fit=None):
    """Trains with a hook on a class or an object; returns what it saw, too.

    Args:
        hook: Makes the hook of a method.
        of: The class with the method.
        name: The method's name.
        when: Whether the hook is set before or after the policy, or on the
            model, or on a class of the user's.
        policy: The policy.
        wraps: Whether it has the name and signature of the method.
        fit: Arguments of `fit`.
    """
    seen = []

    def set_on(owner):
        method = getattr(owner, name)
        new = hook(method, seen)
        patch.setattr(
            owner, name, functools.wraps(method)(new) if wraps else new
        )

    with pytest.MonkeyPatch.context() as patch:
        if when == "before":
            # As before the import of tfmix, which replaces `compile`.
            tfmix.set_global_policy("float32")
            set_on(of)
        with tfmix.policy_scope(policy):
            if when == "after":
                set_on(of)
            model = network()
            if when == "object":
                method = getattr(model, name)
                made = hook(lambda self, *a, **k: method(*a, **k), seen)
                patch.setattr(model, name, functools.partial(made, model))
            return *trained(model, fit), seen


def assert_alike(found, expected, policy):
    """Fails unless a run in 16 bit is that in float32, up to rounding."""
    history, weights, seen = found
    history_32, weights_32, seen_32 = expected
    assert seen == seen_32
    assert history.keys() == history_32.keys()
    for name, values in history_32.items():
        helpers.assert_close(history[name], values, policy[6:])
    for found, wanted in zip(weights, weights_32, strict=True):
        helpers.assert_close(found, wanted, policy[6:])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("wraps", [False, True])
@pytest.mark.parametrize("when", ["before", "after", "object"])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_function_on_a_method_gets_and_gives_what_it_does_without_tfmix(
    hook, when, wraps, policy
):
    name, fit = HOOKS[hook]
    run = functools.partial(
        hooked, hook, keras.Model, name, when, wraps=wraps, fit=fit
    )
    assert_alike(run(policy), run("float32"), policy)


class WithOtherArguments(keras.Sequential):
    """Its methods do not take what Keras's do, nor in that order."""

    def compile(self, rate, **others):
        super().compile(optimizer=keras.optimizers.SGD(rate), **others)

    def fit(self, data, times):
        return super().fit(*data, epochs=times, verbose=0, shuffle=False)

    def evaluate(self, data):
        return super().evaluate(*data, verbose=0)

    def predict(self, data):
        return super().predict(data, verbose=0)


@pytest.mark.costly
@pytest.mark.parametrize("policy", POLICIES)
def test_methods_with_arguments_of_their_own_get_them(policy):
    def run(policy):
        with tfmix.policy_scope(policy):
            model = WithOtherArguments(network().layers)
            model.compile(0.1, loss="mse")
            history = model.fit((X, Y), 2).history
            history["test"] = [model.evaluate((X, Y))]
            return history, [model.predict(X), *model.get_weights()], []

    assert_alike(run(policy), run("float32"), policy)


# TensorFlow's trainer calls `apply_gradients`, JAX's only `apply`.
COUNTED = [
    (keras.Layer, "__call__"),
    (keras.layers.Dense, "call"),
    (keras.Model, "train_step"),
    (keras.Model, "make_train_function"),
    (keras.Model, "compute_loss"),
    (keras.optimizers.Optimizer, "apply"),
    (keras.optimizers.Optimizer, "apply_gradients"),
]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("of", "name"), COUNTED)
def test_a_function_on_a_method_is_called(of, name, when, policy):
    # Keras itself needs the signature of a `call`.
    wraps = name == "call"
    run = functools.partial(hooked, counts, of, name, when, wraps=wraps)
    history, weights, seen = run(policy)
    expected = run("float32")
    is_called = bool(expected[-1])
    assert bool(seen) == is_called
    assert is_called or (helpers.ON_JAX and name == "apply_gradients")
    assert_alike((history, weights, []), (*expected[:2], []), policy)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("hook", [names_three, adds_a_callback])
def test_skipped_steps_are_told_behind_a_hook(hook, policy, said, monkeypatch):
    tfmix.set_global_policy(policy)
    monkeypatch.setattr(keras.Model, "fit", hook(keras.Model.fit, []))
    model = network()
    model.compile("sgd", "mse")
    bad = X.copy()
    bad[3] = np.nan
    model.fit(bad, Y, epochs=1)
    assert said == [
        "1 of 1 steps of epoch 1 was skipped: `x` holds NaN or infinity in 1 "
        "of 16 rows (3); drop or fix them"
    ]


def test_skipped_steps_are_told_where_the_fit_of_the_class_is_called(said):
    tfmix.set_global_policy("mixed_float16")
    model = network()
    model.compile("sgd", "mse")
    bad = X.copy()
    bad[3] = np.nan
    history = keras.Model.fit(model, bad, Y, epochs=2, verbose=0)
    begun = "the loss was not finite; look for rows of the data that are not"
    assert said[0].startswith(f"1 of 1 steps of epoch 1 was skipped: {begun}")
    assert len(said) == 2
    # Nothing of the watch stays on what Keras returns.
    model.train_on_batch(X, Y)
    pickle.dumps(history)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("of", "name"), [(keras.Model, "compile"), *COUNTED[:1], COUNTED[5]]
)
@pytest.mark.parametrize("first", ["hook", "policy"])
def test_hooks_and_policies_end_in_either_order(of, name, first):
    before = getattr(of, name)
    patch = pytest.MonkeyPatch()
    policy = tfmix.policy_scope("mixed_float16")
    if first == "hook":
        patch.setattr(of, name, counts(before, []))
        with policy:
            trained(network())
            patch.undo()
            _, weights = trained(network())
    else:
        with policy:
            patch.setattr(of, name, counts(getattr(of, name), []))
            _, weights = trained(network())
        trained(network())
        patch.undo()
    assert getattr(of, name) is before
    with tfmix.policy_scope("mixed_float16"):
        _, again = trained(network())
    for one, other in zip(weights, again, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("mode", ["fit", "loop"])
@pytest.mark.parametrize("first", ["hook", "policy"])
def test_a_bad_step_is_skipped_beside_a_function_on_apply(first, mode):
    weight, seen = keras.Variable([1.0]), []
    optimizer = keras.optimizers.Optimizer
    with pytest.MonkeyPatch.context() as patch:
        if first == "hook":
            patch.setattr(optimizer, "apply", counts(optimizer.apply, seen))
        tfmix.set_global_policy("mixed_float16")
        if first == "policy":
            patch.setattr(optimizer, "apply", counts(optimizer.apply, seen))
        sgd = keras.optimizers.SGD(1.0)
        step = sgd.apply
        if mode == "fit":
            step = tfmix.LossScaleOptimizer(sgd, loss_scale=1.0).apply
        for value in (np.nan, 1.0):
            step([keras.ops.array([value])], [weight])
    np.testing.assert_array_equal(weight.numpy(), [0.0])
    assert "SGD" in seen


@pytest.mark.costly
@pytest.mark.parametrize(
    "dump", [copy.deepcopy, pickle.dumps], ids=["deepcopy", "pickle"]
)
def test_a_callback_may_copy_the_model_while_it_trains(dump):
    copies = []
    note = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: copies.append(dump(model))
    )
    tfmix.set_global_policy("mixed_float16")
    model = network()
    model.compile("sgd", "mse")
    model.fit(X, Y, epochs=2, verbose=0, callbacks=[note])
    assert len(copies) == 2
