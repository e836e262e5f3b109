"""Laws that hold after each step, and functions that inspect a model."""

import functools

import keras

import tfmix
from tests import helpers
from tests.autocast import replaced_names
from tests.orders.models import make_model
from tests.orders.order import FROZEN


class Broken(AssertionError):
    """A broken law; the message starts with its letter."""


def law(letter, holds, message=""):
    if not holds:
        raise Broken(f"{letter}: {message}")


def named_layers(model):
    return [model.get_layer(name) for name in FROZEN]


def dtypes_of(model):
    return {
        layer.name: (layer.compute_dtype, layer.variable_dtype)
        for layer in named_layers(model)
    }


@functools.cache
def fresh_dtypes(kind, policy):
    with tfmix.policy_scope("float32"):
        model = make_model(kind)
    return dtypes_of(tfmix.convert_model(model, policy))


def converted_dtypes(kind, policy, before, found):
    """Returns the allowed dtypes of a conversion that are closest to `found`.

    In a model with 16-bit layers, float32 layers may stay: they may be
    deliberate.
    """
    fresh = fresh_dtypes(kind, policy)
    wide = ("float32", "float32")
    if all(pair == wide for pair in before.values()):
        return fresh
    return {
        name: wide if before[name] == wide == found[name] else fresh[name]
        for name in fresh
    }


def chain_of(model):
    """Returns the optimizer and its inner optimizers, outermost first."""
    chain = [model.optimizer]
    while "inner_optimizer" in vars(chain[-1]):
        chain.append(chain[-1].inner_optimizer)
    return chain


def is_scaled(model):
    return isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)


def state_of(model):
    """Copies a model's weights and its optimizer's variables."""
    found = [*model.weights, *model.optimizer.variables]
    values = [*tfmix.optimizers.export_float32(model), *helpers.snapshot(found)]
    names = [v.path for v in model.weights] + [v.path for v in found]
    pairs = zip(names, values, strict=True)
    return [(n.split("/")[-1], v.tobytes()) for n, v in pairs]


def same_state(before, after, what):
    count = f"{len(before)} variables are {len(after)} after {what}"
    if len(before) != len(after):
        return False, count
    pairs = zip(before, after, strict=True)
    changed = [old[0] for old, new in pairs if old[1] != new[1]]
    return not changed, f"{changed} changed by {what}"


@functools.cache
def keras_before():
    """Records each attribute of each module and class of Keras."""
    owners = replaced_names.owners()
    return owners, replaced_names.snapshot(owners)


def replaced():
    """Returns whether Keras is unchanged, and the changed attributes."""
    owners, before = keras_before()
    changed = replaced_names.changed(before, owners)
    # Keras sets some at its first use.
    different = [replaced_names.label(*at) for at in changed if at in before]
    return not different, f"still replaced in Keras: {different[:4]}"
