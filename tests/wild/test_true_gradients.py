"""Gradients that you take with TensorFlow are those of float32.

Every form runs unchanged, in float32 and with one line before it.
"""

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfmix

if keras.backend.backend() != "tensorflow":
    pytest.skip("test_true_gradients_jax.py", allow_module_level=True)

import tensorflow as tf

# float16's own rounding errors are below this, even when they add up.
WITHIN = 0.005
MODES = ("eager", "graph", "jit", "nested")
QUICK = {
    ("mean_over_many_pixels", "jit"),
    ("sparse_rows", "graph"),
    ("penalty_on_a_gradient_of_weights", "eager"),
    ("loss_times_1e6", "nested"),
    ("one_tensor_given_twice", "eager"),
    ("one_tensor_given_twice", "graph"),
    ("ragged_argument", "graph"),
    ("complex_argument", "eager"),
    ("memory_between_calls", "eager"),
    ("memory_between_calls", "graph"),
    ("scores_left_on_a_layer", "eager"),
    ("scores_left_on_a_layer", "jit"),
    ("a_variable_as_input", "eager"),
    ("a_variable_as_input", "graph"),
    ("forces_by_a_sequential", "jit"),
    ("heads_of_unlike_losses", "eager"),
    ("heads_of_unlike_losses", "jit"),
    ("forces_by_a_functional", "eager"),
}
X = np.random.default_rng(0).normal(size=(64, 16)).astype("float32")
# Targets are not around 0, where the sum for a bias would cancel.
Y = np.random.default_rng(1).normal(3.0, size=(64, 1)).astype("float32")
FORMS = {}
# In a `tf.function`, float32 or tfmix has no gradient of these.
NOT_NESTED = {
    "one_output_by_another",
    "memory_between_calls",
    "scores_left_on_a_layer",
}


def form(function):
    """Registers a function that returns a function for gradients.

    Its argument is a wrapper for a model's calls: none, or `tf.function`.
    """
    FORMS[function.__name__] = function
    return function


def network(inputs=16, outputs=1, **first):
    # There is no `relu`: numbers that round to the other side of 0 would pass,
    # while float32 blocks them.
    return keras.Sequential(
        [
            keras.Input((inputs,)),
            layers.Dense(32, "tanh", **first),
            layers.Dense(outputs),
        ]
    )


def gradients_of_loss(model, loss):
    def gradients():
        with tf.GradientTape() as tape:
            value = loss()
        return tape.gradient(value, model.trainable_variables)

    return gradients


@form
def mean_over_many_pixels(called):
    model = keras.Sequential(
        [
            keras.Input((3072,)),
            layers.Dense(32, "tanh"),
            layers.Dense(3072, "sigmoid"),
        ]
    )
    x = np.random.default_rng(0).random((64, 3072), "float32")
    call = called(model)
    return gradients_of_loss(model, lambda: tf.reduce_mean((call(x) - x) ** 2))


@form
def sparse_rows(called):
    model = keras.Sequential(
        [
            keras.Input((64,), dtype="int32"),
            layers.Embedding(500, 32),
            layers.Dense(32, "tanh"),
            layers.Dense(500),
        ]
    )
    x = np.random.default_rng(0).integers(0, 500, (64, 64)).astype("int32")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    call = called(model)
    found = gradients_of_loss(model, lambda: loss(np.roll(x, 1, 1), call(x)))

    def gradients():
        sparse, *others = found()
        assert isinstance(sparse, tf.IndexedSlices)
        return [tf.convert_to_tensor(sparse), *others]

    return gradients


def summed(factor):
    def of_factor(called):
        model = network()
        call = called(model)

        def loss():
            return factor * tf.reduce_sum((call(X) - Y) ** 2)

        return gradients_of_loss(model, loss)

    return of_factor


FORMS["summed_loss"] = summed(1.0)
FORMS["loss_times_1e_6"] = summed(1e-6)
FORMS["loss_times_1e6"] = summed(1e6)


class LeavesScores(layers.Layer):
    """Leaves a value on itself that a loss uses besides the results."""

    def call(self, x):
        self.scores = ops.cast(x, "float32")
        return ops.tanh(x)


@form
def scores_left_on_a_layer(called):
    scoring = LeavesScores()
    model = keras.Sequential(
        [keras.Input((16,)), layers.Dense(32), scoring, layers.Dense(1)]
    )
    call = called(model)

    def loss():
        error = tf.reduce_mean((call(X) - Y) ** 2)
        return 1e-6 * (error + tf.reduce_mean(scoring.scores**2))

    return gradients_of_loss(model, loss)


class Forces(keras.Model):
    """Energies of positions, and their derivatives: the forces."""

    def __init__(self, energy):
        super().__init__()
        self.energy = energy
        self.built = True

    def call(self, positions):
        with tf.GradientTape() as tape:
            tape.watch(positions)
            energy = self.energy(positions)
        return energy, -tape.gradient(energy, positions)


def forces_by(energy):
    def forces_inside_a_call(called):
        model = Forces(energy())
        call = called(model)

        def loss():
            found, forces = call(tf.constant(X))
            loss = tf.reduce_mean((found - Y) ** 2)
            return loss + tf.reduce_mean((forces - 0.1) ** 2)

        return gradients_of_loss(model, loss)

    return forces_inside_a_call


def functional():
    inputs = keras.Input((16,))
    hidden = layers.Dense(32, "tanh")(inputs)
    return keras.Model(inputs, layers.Dense(1)(hidden + 1.0))


FORMS["forces_by_a_sequential"] = forces_by(network)
FORMS["forces_by_a_functional"] = forces_by(functional)


@form
def penalty_on_a_gradient_of_inputs(called):
    model = network()
    x, call = tf.constant(X), called(model)

    def loss():
        with tf.GradientTape() as tape:
            tape.watch(x)
            score = call(x)
        slope = tape.gradient(score, x)
        norm = tf.sqrt(tf.reduce_sum(slope**2, -1))
        return tf.reduce_mean((norm - 1.0) ** 2) + tf.reduce_mean(score)

    return gradients_of_loss(model, loss)


@form
def penalty_on_a_gradient_of_weights(called):
    model = network()
    call = called(model)

    def loss():
        with tf.GradientTape() as tape:
            value = tf.reduce_mean((call(X) - Y) ** 2)
        found = tape.gradient(value, model.trainable_variables)
        return tf.add_n([tf.reduce_sum(each**2) for each in found])

    return gradients_of_loss(model, loss)


@form
def three_derivatives(called):
    model = network(inputs=2)
    x, call = tf.constant(X[:, :2]), called(model)

    def loss():
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                score = call(x)
            slope = inner.gradient(score, x)[:, :1]
        return tf.reduce_mean(outer.gradient(slope, x)[:, :1] ** 2)

    found = gradients_of_loss(model, loss)
    # Nothing reaches the last bias.
    return lambda: found()[:-1]


@form
def a_step_inside_of_the_loss(called):
    model = network()

    def loss_of(weights):
        frozen = model.non_trainable_variables
        guess, _ = model.stateless_call(weights, frozen, X)
        return tf.reduce_mean((guess - Y) ** 2)

    def loss():
        weights = [v.value for v in model.trainable_variables]
        with tf.GradientTape() as tape:
            tape.watch(weights)
            value = loss_of(weights)
        slopes = tape.gradient(value, weights)
        return loss_of(
            [w - 0.1 * s for w, s in zip(weights, slopes, strict=True)]
        )

    return gradients_of_loss(model, loss)


@form
def each_example_by_jacobian(called):
    model = network()
    call = called(model)

    def gradients():
        with tf.GradientTape() as tape:
            losses = tf.reduce_mean((call(X) - Y) ** 2, -1)
        return tape.jacobian(losses, model.trainable_variables)

    return gradients


@form
def each_example_by_vectorized_map(called):
    model = network()
    call = called(model)

    def of_one(pair):
        x, y = pair
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((call(x[None]) - y[None]) ** 2)
        return tape.gradient(loss, model.trainable_variables)

    return lambda: tf.vectorized_map(of_one, (tf.constant(X), tf.constant(Y)))


@form
def rematerialised_layers(called):
    with keras.RematScope("full"):
        hidden = [layers.Dense(32, "tanh"), layers.Dense(32, "tanh")]
    model = keras.Sequential([keras.Input((16,)), *hidden, layers.Dense(1)])
    call = called(model)
    return gradients_of_loss(model, lambda: tf.reduce_mean((call(X) - Y) ** 2))


@form
def two_models_in_a_row(called):
    first, second = network(outputs=8), network(inputs=8)
    calls = called(first), called(second)

    def gradients():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((calls[1](calls[0](X)) - Y) ** 2)
        both = first.trainable_variables, second.trainable_variables
        return tape.gradient(loss, [*both[0], *both[1]])

    return gradients


@form
def three_calls_of_one_model(called):
    model = network(outputs=8)
    call = called(model)

    def loss():
        near = tf.reduce_sum((call(X) - call(X + 0.1)) ** 2, -1)
        far = tf.reduce_sum((call(X) - call(np.roll(X, 1, 0))) ** 2, -1)
        return tf.reduce_mean(tf.maximum(near - far + 100.0, 0.0))

    found = gradients_of_loss(model, loss)
    # The last layer's bias cancels.
    return lambda: found()[:-1]


@form
def activity_regularizer_beside_a_small_loss(called):
    model = network(activity_regularizer=keras.regularizers.L2(1e-3))

    def loss():
        guess = model(X)
        return 1e-4 * tf.reduce_mean((guess - Y) ** 2) + tf.add_n(model.losses)

    return gradients_of_loss(model, loss)


class Added(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden, self.last = layers.Dense(32, "tanh"), layers.Dense(1)

    def call(self, x):
        hidden = self.hidden(x)
        self.add_loss(1e-3 * ops.mean(ops.square(hidden)))
        return self.last(hidden)


@form
def added_loss_beside_a_small_loss(called):
    model = Added()
    model(X)

    def loss():
        guess = model(X)
        return 1e-5 * tf.reduce_mean((guess - Y) ** 2) + tf.add_n(model.losses)

    return gradients_of_loss(model, loss)


@form
def input_of_a_classifier_in_training(called):
    model = keras.Sequential(
        [
            keras.Input((16,)),
            layers.Dense(32, "tanh"),
            layers.BatchNormalization(),
            layers.Dense(4, "softmax"),
        ]
    )
    x, call = tf.constant(X), called(model)
    loss = keras.losses.SparseCategoricalCrossentropy()

    def gradients():
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = loss(np.arange(64) % 4, call(x, training=True))
        return [tape.gradient(value, x)]

    return gradients


@form
def one_output_by_another(called):
    """Computes Grad-CAM, as in Keras's example."""
    inputs = keras.Input((12, 12, 3))
    last = layers.Conv2D(8, 3, activation="tanh")(inputs)
    pooled = layers.GlobalAveragePooling2D()(layers.Conv2D(8, 3)(last))
    model = keras.Model(inputs, [last, layers.Dense(5)(pooled)])
    x = np.random.default_rng(0).normal(size=(4, 12, 12, 3)).astype("float32")
    call = called(model)

    def gradients():
        with tf.GradientTape() as tape:
            activations, scores = call(x)
            best = scores[:, 0]
        return [tape.gradient(best, activations)]

    return gradients


class Around(keras.Model):
    """A user's own model around another."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.built = True

    def call(self, x):
        return self.inner(x)


@form
def a_variable_as_input(called):
    """Optimizes an input, as in style transfer or a search for a latent."""
    latent, models = tf.Variable(X), (network(), Around(network()))
    calls = list(map(called, models))

    def gradients():
        with tf.GradientTape(persistent=True) as tape:
            losses = [tf.reduce_mean((call(latent) - Y) ** 2) for call in calls]
        return [tape.gradient(loss, latent) for loss in losses]

    return gradients


@form
def heads_of_unlike_losses(called):
    inputs = keras.Input((16,))
    trunk = layers.Dense(32, "tanh")(inputs)
    pixels = layers.Dense(4096)(layers.Dense(16, "tanh")(trunk))
    number = layers.Dense(1)(layers.Dense(16, "tanh")(trunk))
    model = keras.Model(inputs, {"number": number, "pixels": pixels})
    call = called(model)

    def loss():
        found = call(X)
        faint = tf.reduce_mean((found["pixels"] - 1.0) ** 2)
        return tf.reduce_mean((found["number"] - Y) ** 2) + 1e-6 * faint

    return gradients_of_loss(model, loss)


@form
def an_encoder_that_returns_what_it_draws_from(called):
    """Trains a variational autoencoder, as in Keras's example."""
    inputs = keras.Input((64,))
    hidden = layers.Dense(32, activation="relu")(inputs)
    mean, log_var = layers.Dense(4)(hidden), layers.Dense(4)(hidden)
    drawn = mean + keras.ops.exp(0.5 * log_var) * 0.3
    encoder = keras.Model(inputs, [mean, log_var, drawn])
    x = np.random.default_rng(0).normal(size=(8, 64)).astype("float32")
    call = called(encoder)
    decoder = keras.Sequential([keras.Input((4,)), layers.Dense(64)])

    def loss():
        mean, log_var, drawn = call(x)
        kl = keras.ops.exp(log_var) + mean**2 - 1 - log_var
        # This is a mean over very many pixels.
        made = tf.reduce_mean((decoder(drawn) - x) ** 2) * 1e-6
        return made + 1e-7 * tf.reduce_mean(kl)

    return gradients_of_loss(encoder, loss)


def given(another, called, make):
    """Takes gradients of a model whose changed result is `another`'s input."""
    model = network(outputs=8)
    call = called(model)

    def loss():
        return tf.reduce_mean((another(make(call(X))) - 2.0) ** 2)

    return gradients_of_loss(model, loss)


@form
def one_tensor_given_twice(called):
    inputs = [keras.Input((8,)), keras.Input((8,))]
    hidden = [layers.Dense(16, "tanh")(one) for one in inputs]
    another = keras.Model(inputs, layers.Dense(1)(ops.add(*hidden)))
    return given(another, called, lambda h: [h, h])


class Pooled(keras.Model):
    def __init__(self):
        super().__init__()
        self.last = layers.Dense(1)
        self.last.build((None, 8))
        self.built = True

    def call(self, x):
        return self.last(tf.reduce_sum(x, axis=1))


@form
def ragged_argument(called):
    def ragged(h):
        return tf.RaggedTensor.from_row_splits(h, [0, 3, 10, 64])

    return given(Pooled(), called, ragged)


class Parts(keras.Model):
    def __init__(self):
        super().__init__()
        self.last = layers.Dense(1)
        self.last.build((None, 16))
        self.built = True

    def call(self, z):
        return self.last(tf.concat([tf.math.real(z), tf.math.imag(z)], -1))


@form
def complex_argument(called):
    return given(Parts(), called, lambda h: tf.complex(h, 0.5 * h))


class Memory(keras.Model):
    """Uses its earlier results, through an attribute."""

    def __init__(self):
        super().__init__()
        self.cell, self.last = layers.Dense(8, "tanh"), layers.Dense(1)
        self.cell.build((None, 24))
        self.last.build((None, 8))
        self.built = True

    def call(self, x):
        memory = tf.cast(self.memory, x.dtype)
        self.memory = self.cell(tf.concat([x, memory], -1))
        return self.last(self.memory)


@form
def memory_between_calls(called):
    model, first = Memory(), network(outputs=8)

    def gradients():
        with tf.GradientTape() as tape:
            model.memory = first(X)
            for scale in (0.5, 1.0):
                loss = tf.reduce_mean((model(scale * X) - Y) ** 2)
        weights = first.trainable_variables + model.trainable_variables
        return tape.gradient(loss, weights)

    return gradients


def gradients_under(policy, name, mode):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    tfmix.set_global_policy(policy)
    gradients = FORMS[name](tf.function if mode == "nested" else lambda m: m)
    if mode != "eager":
        gradients = tf.function(gradients, jit_compile=mode == "jit")
    return [each.numpy() for each in gradients()]


def errors(right, found):
    """Returns each gradient's distance from the right one, by its norm."""
    return [
        float(np.linalg.norm(a - b) / np.linalg.norm(a))
        for a, b in zip(right, found, strict=True)
    ]


def cases():
    for name in FORMS:
        for mode in MODES[: 3 if name in NOT_NESTED else 4]:
            marks = [] if (name, mode) in QUICK else [pytest.mark.slow]
            yield pytest.param(name, mode, marks=marks, id=f"{name}-{mode}")


@pytest.mark.parametrize(("name", "mode"), list(cases()))
def test_gradients_are_those_of_float32(name, mode):
    right = gradients_under("float32", name, mode)
    found = gradients_under("mixed_float16", name, mode)
    assert {each.dtype.name for each in found} == {"float32"}
    assert max(errors(right, found)) < WITHIN, errors(right, found)


def test_an_error_of_one_percent_in_one_gradient_shows():
    right = gradients_under("float32", "summed_loss", "eager")
    found = [*right[:-1], right[-1] * 1.01]
    assert max(errors(right, found)) > WITHIN
