"""One program: what layers compute decides, not how their model was made."""

import collections
import copy
import functools
import pickle
import re

import keras
import numpy as np
import pytest
from keras import layers

import tfmix

POLICIES = ("mixed_float16", "mixed_bfloat16")
ROWS = 4
LOSS = "sparse_categorical_crossentropy"
# Keras warns about an optimizer that has taken no step.
pytestmark = pytest.mark.filterwarnings("ignore:Skipping variable loading")


def dense():
    """Dense with BatchNormalization."""
    inputs = keras.Input((6,))
    x = layers.Dense(8, activation="relu")(inputs)
    return inputs, layers.BatchNormalization()(x)


def convolution():
    """Conv2D."""
    inputs = keras.Input((6, 6, 1))
    x = layers.Conv2D(4, 3, activation="relu")(inputs)
    return inputs, layers.GlobalAveragePooling2D()(x)


def recurrent():
    """LSTM with a mask."""
    inputs = keras.Input((5, 2))
    return inputs, layers.LSTM(4)(layers.Masking()(inputs))


def attention():
    """Attention, with a part that is a model."""
    inputs = keras.Input((5, 4))
    x = layers.MultiHeadAttention(2, 4)(inputs, inputs)
    x = layers.LayerNormalization()(layers.add([inputs, x]))
    part = [keras.Input((5, 4)), layers.Dense(4, activation="gelu")]
    return inputs, layers.Flatten()(keras.Sequential(part)(x))


def activation():
    """One that ends in a plain `Activation`."""
    inputs = keras.Input((6,))
    return inputs, layers.Dense(8, activation="tanh")(inputs)


def ending(kind):
    """Makes the last layers of a kind."""
    last = {
        recurrent: functools.partial(layers.Softmax, dtype="float32"),
        activation: functools.partial(
            layers.Activation, "softmax", dtype="float32"
        ),
    }
    softmax = functools.partial(tfmix.float32_output, "softmax")
    if kind is convolution:
        return [layers.Dense(3, "softmax", dtype="float32")]
    return [layers.Dense(3), last.get(kind, softmax)()]


KINDS = (dense, convolution, recurrent, attention, activation)


def with_ending(inputs, x, kind):
    for layer in ending(kind):
        x = layer(x)
    return keras.Model(inputs, x)


def make_model(kind, policy="float32"):
    """Makes a model under a policy; it is not compiled."""
    with tfmix.policy_scope(policy):
        return with_ending(*kind(), kind)


def compiled(model):
    model.compile("adam", LOSS)
    return model


def loaded(model, policy=None, folder=None):
    """Saves a model and loads it: in a scope, or outside of any."""
    path = folder / "model.keras"
    model.save(path)
    if policy is None:
        return keras.models.load_model(path)
    with tfmix.policy_scope(policy):
        return keras.models.load_model(path)


def made_in_a_scope(kind, policy, folder):
    with tfmix.policy_scope(policy):
        return compiled(make_model(kind, policy))


def compiled_file_in_a_scope(kind, policy, folder):
    return loaded(compiled(make_model(kind, policy)), policy, folder)


def compiled_file_outside(kind, policy, folder):
    return loaded(compiled(make_model(kind, policy)), None, folder)


def file_in_a_scope(kind, policy, folder):
    return compiled(loaded(make_model(kind, policy), policy, folder))


def file_outside(kind, policy, folder):
    return compiled(loaded(make_model(kind, policy), None, folder))


def clone(kind, policy, folder):
    return compiled(keras.models.clone_model(make_model(kind, policy)))


def from_config(kind, policy, folder):
    return compiled(
        keras.Model.from_config(make_model(kind, policy).get_config())
    )


def pickled(kind, policy, folder):
    return pickle.loads(pickle.dumps(compiled(make_model(kind, policy))))


def copied(kind, policy, folder):
    return copy.deepcopy(compiled(make_model(kind, policy)))


def applied(kind, policy, folder):
    model = compiled(make_model(kind))
    tfmix.apply_policy(model, policy)
    return model


def applied_then_compiled(kind, policy, folder):
    model = make_model(kind)
    tfmix.apply_policy(model, policy)
    return compiled(model)


def converted(kind, policy, folder):
    return tfmix.convert_model(compiled(make_model(kind)), policy)


def prepared(kind, policy, folder):
    model, optimizer, _ = tfmix.prepare(make_model(kind), "adam", policy)
    model.compile(optimizer, LOSS)
    return model


def wrapped(kind, policy, folder):
    model = make_model(kind, policy)
    return compiled(keras.Model(model.input, model(model.input)))


def loaded_and_wrapped(kind, policy, folder):
    model = loaded(make_model(kind, policy), None, folder)
    inputs = keras.Input(model.input_shape[1:])
    return compiled(keras.Sequential([inputs, model]))


def new_head(kind, policy, folder):
    model = loaded(make_model(kind, policy), None, folder)
    with tfmix.policy_scope(policy):
        trunk = model.layers[-len(ending(kind)) - 1].output
        return compiled(with_ending(model.inputs, trunk, kind))


WAYS = (
    *(made_in_a_scope, compiled_file_in_a_scope, compiled_file_outside),
    *(file_in_a_scope, file_outside, clone, from_config),
    *(pickled, copied, applied, applied_then_compiled, converted, prepared),
    *(wrapped, loaded_and_wrapped, new_head),
)


def program(model):
    """Returns the text of a compiled model's training step, as lowered."""
    x = np.ones((ROWS, *model.input_shape[1:]), "float32")
    y = np.arange(ROWS) % 3
    # As `fit` does before its first step.
    model._symbolic_build(data_batch=(x, y))
    model.optimizer.build(model.trainable_variables)
    if keras.backend.backend() == "jax":
        import jax

        state = tuple(
            [variable.value for variable in variables]
            for variables in (
                model.trainable_variables,
                model.non_trainable_variables,
                model.optimizer.variables,
                model.metrics_variables,
            )
        )
        return jax.jit(model.train_step).lower(state, (x, y)).as_text()
    import tensorflow as tf

    step = tf.function(lambda x, y: model.train_step((x, y)), autograph=False)
    return str(step.get_concrete_function(x, y).graph.as_graph_def())


def operations(text):
    """Counts the operations of a program by their names."""
    pattern = r"= \"?(\w+\.\w+)"
    if keras.backend.backend() == "tensorflow":
        pattern = r"\bop: \"(\w+)\""
    return collections.Counter(re.findall(pattern, text))


@functools.cache
def expected(kind, policy):
    """Counts the operations of a model that was compiled after its scope."""
    found = operations(program(compiled(make_model(kind, policy))))
    assert sum(found.values()) > 100
    return found


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_however_a_model_was_made_it_is_one_program(
    way, kind, policy, tmp_path
):
    found = operations(program(way(kind, policy, tmp_path)))
    difference = collections.Counter(found)
    difference.subtract(expected(kind, policy))
    assert not {k: n for k, n in difference.items() if n}


# Of the others, tfmix's rules keep a layer or a mask in float32.
@pytest.mark.costly
@pytest.mark.parametrize("kind", [dense, attention, activation])
@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_model_of_keras_alone_is_the_same_program(is_loaded, kind, tmp_path):
    keras.config.set_dtype_policy("mixed_float16")
    model = with_ending(*kind(), kind)
    keras.config.set_dtype_policy("float32")
    compiled(model)
    if is_loaded:
        model = loaded(model, None, tmp_path)
    found = operations(program(model))
    assert found == expected(kind, "mixed_float16")


def test_the_comparison_sees_another_program():
    model = make_model(dense, "mixed_float16")
    model.layers[-1].dtype_policy = keras.DTypePolicy("mixed_float16")
    found = operations(program(compiled(model)))
    assert found != expected(dense, "mixed_float16")
