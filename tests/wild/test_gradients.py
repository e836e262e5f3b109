"""Gradients that you take yourself are those of float32.

Every form runs unchanged, in float32 and with one line before it.
"""

import functools

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfmix

ON_JAX = keras.backend.backend() == "jax"
if ON_JAX:
    import jax
    import jax.numpy as jnp
else:
    import tensorflow as tf

# float16's own rounding errors are below this, even when they add up.
WITHIN = 0.005
# Under "nested", the calls of a model are compiled inside a compiled step.
MODES = ("eager", "jit") if ON_JAX else ("eager", "graph", "jit", "nested")
# The cases of a quick run. Under JAX, a tangent takes ten seconds op by op.
QUICK = {
    True: """
        mean_over_many_pixels-eager penalty_on_a_gradient_of_weights-jit
        sharded_over_a_mesh-jit loss_on_a_tangent-jit
    """,
    False: """
        mean_over_many_pixels-jit sparse_rows-graph loss_times_1e6-nested
        penalty_on_a_gradient_of_weights-eager ragged_argument-graph
        one_tensor_given_twice-eager one_tensor_given_twice-graph
        memory_between_calls-eager scores_left_on_a_layer-graph
        a_variable_as_input-graph heads_of_unlike_losses-jit
        forces_by_a_sequential-jit
        complex_argument-eager one_output_by_another-eager
    """,
}[ON_JAX].split()
# In a `tf.function`, float32 or tfmix has no gradient of the first three, and
# the second derivative of a head whose loss is 1e-6 of the other's is 0.
NOT_NESTED = {
    "one_output_by_another",
    "memory_between_calls",
    "scores_left_on_a_layer",
    "penalty_on_heads_of_unlike_losses",
}
X = np.random.default_rng(0).normal(size=(64, 16)).astype("float32")
# Targets are not around 0, where the sum for a bias would cancel.
Y = np.random.default_rng(1).normal(3.0, size=(64, 1)).astype("float32")
FORMS = {}


def form(function):
    """Registers a form.

    It is given the function that calls a model. It returns a function that
    takes gradients, and the weights on which these depend.
    """
    FORMS[function.__name__] = function
    return function


def only_under(backend):
    """Registers a form that one backend has."""
    return form if backend == keras.backend.backend() else lambda f: f


def call(model, x, **how):
    if not ON_JAX:
        return model(x, **how)
    return model.stateless_call(values_of(model), frozen(model), x, **how)[0]


def values_of(*models):
    return [v.value for m in models for v in m.trainable_variables]


def frozen(model):
    return [v.value for v in model.non_trainable_variables]


def by_weights(loss, weights):
    """Returns the gradients of `loss()`."""
    if not ON_JAX:
        with tf.GradientTape() as tape:
            value = loss()
        return tape.gradient(value, weights)

    def of(values):
        with keras.StatelessScope(zip(weights, values, strict=True)):
            return loss()

    return jax.grad(of)([v.value for v in weights])


def by_tensors(loss, at):
    """Returns the gradients of `loss(at)`; a loss of many numbers is summed."""
    if ON_JAX:
        return jax.grad(lambda at: jnp.sum(loss(at)))(at)
    with tf.GradientTape() as tape:
        tape.watch(at)
        value = loss(at)
    return tape.gradient(value, at)


def gradients_of(loss, *models):
    weights = [v for model in models for v in model.trainable_variables]
    return lambda: by_weights(loss, weights), weights


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


def classifier(activation=None, rate=0.0):
    return keras.Sequential(
        [
            keras.Input((16,)),
            layers.Dense(32, "tanh"),
            layers.BatchNormalization(),
            layers.Dropout(rate, seed=0),
            layers.Dense(4, activation),
        ]
    )


def error(guess, target=Y):
    return ops.mean((guess - target) ** 2)


@form
def mean_over_many_pixels(call):
    hidden = layers.Dense(32, "tanh")
    last = layers.Dense(3072, "sigmoid")
    model = keras.Sequential([keras.Input((3072,)), hidden, last])
    x = np.random.default_rng(0).random((64, 3072), "float32")
    return gradients_of(lambda: error(call(model, x), x), model)


def of_tokens(call, use_bias):
    model = keras.Sequential(
        [
            keras.Input((64,), dtype="int32"),
            layers.Embedding(500, 32),
            layers.Dense(32, "tanh", use_bias=use_bias),
            layers.Dense(500, use_bias=use_bias),
        ]
    )
    x = np.random.default_rng(0).integers(0, 500, (64, 64)).astype("int32")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return gradients_of(lambda: loss(np.roll(x, 1, 1), call(model, x)), model)


@form
def sparse_rows(call):
    found, weights = of_tokens(call, use_bias=ON_JAX)

    def gradients():
        rows, *others = found()
        if not ON_JAX:
            assert isinstance(rows, tf.IndexedSlices)
        return [ops.convert_to_tensor(rows), *others]

    return gradients, weights


def summed(factor):
    def of_factor(call):
        model = network()
        return gradients_of(
            lambda: factor * ops.sum((call(model, X) - Y) ** 2), model
        )

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
def scores_left_on_a_layer(call):
    scoring = LeavesScores()
    hidden = [keras.Input((16,)), layers.Dense(32), scoring]
    model = keras.Sequential([*hidden, layers.Dense(1)])

    def loss():
        return 1e-6 * (error(call(model, X)) + ops.mean(scoring.scores**2))

    return gradients_of(loss, model)


def loss_of_heads(call):
    inputs = keras.Input((16,))
    trunk = layers.Dense(32, "tanh")(inputs)
    pixels = layers.Dense(4096)(layers.Dense(16, "tanh")(trunk))
    number = layers.Dense(1)(layers.Dense(16, "tanh")(trunk))
    model = keras.Model(inputs, {"number": number, "pixels": pixels})

    def loss():
        found = call(model, X)
        return error(found["number"]) + 1e-6 * error(found["pixels"], 1.0)

    return loss, model


@form
def heads_of_unlike_losses(call):
    return gradients_of(*loss_of_heads(call))


def penalty(loss, model):
    """Returns the gradients of the squares of a loss's gradients."""

    def squares():
        slopes = by_weights(loss, model.trainable_variables)
        return sum(ops.sum(slope**2) for slope in slopes)

    return gradients_of(squares, model)


@only_under("tensorflow")
def penalty_on_heads_of_unlike_losses(call):
    """JAX has one power for second derivatives, which loses a head's."""
    return penalty(*loss_of_heads(call))


@form
def penalty_on_a_gradient_of_weights(call):
    model = network()
    return penalty(lambda: error(call(model, X)), model)


@form
def penalty_on_a_gradient_of_inputs(call):
    model, x = network(), ops.convert_to_tensor(X)

    def loss():
        slope = by_tensors(lambda x: call(model, x), x)
        norm = ops.sqrt(ops.sum(slope**2, -1))
        return error(norm, 1.0) + ops.mean(call(model, x))

    return gradients_of(loss, model)


@only_under("jax")
def small_penalty_on_a_gradient_of_inputs(call):
    model, x = network(), ops.convert_to_tensor(X)

    def loss():
        slope = by_tensors(lambda x: call(model, x), x)
        return 1e-4 * error(ops.sqrt(ops.sum(slope**2, -1)), 1.0)

    # Nothing reaches the last bias.
    return gradients_of(loss, model.layers[0])


@only_under("jax")
def large_gradients_times_weights(call):
    model = network()
    weights = model.trainable_variables

    def loss():
        slopes = by_weights(lambda: 1e3 * error(call(model, X)), weights)
        return sum(map(ops.vdot, slopes, weights))

    return gradients_of(loss, model)


@form
def three_derivatives(call):
    model, x = network(inputs=2), ops.convert_to_tensor(X[:, :2])

    def slope(x):
        return by_tensors(lambda x: call(model, x), x)[:, :1]

    def loss():
        return ops.mean(by_tensors(slope, x)[:, :1] ** 2)

    found, weights = gradients_of(loss, model)
    # Nothing reaches the last bias.
    return lambda: found()[:-1], weights


@form
def each_example_by_jacobian(call):
    model = network()

    def losses():
        return ops.mean((call(model, X) - Y) ** 2, -1)

    def gradients():
        weights = model.trainable_variables
        if ON_JAX:
            return jax.jacrev(at_weights(losses, weights))(values_of(model))
        with tf.GradientTape() as tape:
            found = losses()
        return tape.jacobian(found, weights)

    return gradients, model.trainable_variables


def at_weights(function, weights):
    """Returns a function of the weights' values (JAX)."""

    def of(values, *args):
        with keras.StatelessScope(zip(weights, values, strict=True)):
            return function(*args)

    return of


@form
def each_example_by_a_map(call):
    model = network()
    weights = model.trainable_variables

    def of_one(pair):
        x, y = pair
        return by_weights(lambda: error(call(model, x[None]), y[None]), weights)

    def gradients():
        pairs = ops.convert_to_tensor(X), ops.convert_to_tensor(Y)
        return (jax.vmap if ON_JAX else vectorized)(of_one)(pairs)

    return gradients, weights


def vectorized(function):
    return functools.partial(tf.vectorized_map, function)


@form
def rematerialised_layers(call):
    with keras.RematScope("full"):
        hidden = [layers.Dense(32, "tanh"), layers.Dense(32, "tanh")]
    model = keras.Sequential([keras.Input((16,)), *hidden, layers.Dense(1)])
    return gradients_of(lambda: error(call(model, X)), model)


def beside_added_losses(model, factor):
    def loss():
        if ON_JAX:
            guess, _, added = model.stateless_call(
                values_of(model), frozen(model), X, return_losses=True
            )
        else:
            guess, added = model(X), model.losses
        return factor * error(guess) + sum(added)

    model(X)
    return gradients_of(loss, model)


class Added(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden, self.last = layers.Dense(32, "tanh"), layers.Dense(1)

    def call(self, x):
        hidden = self.hidden(x)
        self.add_loss(1e-3 * ops.mean(ops.square(hidden)))
        return self.last(hidden)


@form
def added_loss_beside_a_small_loss(call):
    return beside_added_losses(Added(), 1e-5)


@form
def input_of_a_classifier_in_training(call):
    model, x = classifier("softmax"), ops.convert_to_tensor(X)
    loss = keras.losses.SparseCategoricalCrossentropy()

    def of(x):
        return loss(np.arange(64) % 4, call(model, x, training=True))

    return lambda: [by_tensors(of, x)], model.trainable_variables


@form
def an_encoder_that_returns_what_it_draws_from(call):
    """Trains a variational autoencoder, as in Keras's example."""
    inputs = keras.Input((64,))
    hidden = layers.Dense(32, activation="relu")(inputs)
    mean, log_var = layers.Dense(4)(hidden), layers.Dense(4)(hidden)
    drawn = mean + ops.exp(0.5 * log_var) * 0.3
    encoder = keras.Model(inputs, [mean, log_var, drawn])
    x = np.random.default_rng(0).normal(size=(8, 64)).astype("float32")
    decoder = keras.Sequential([keras.Input((4,)), layers.Dense(64)])

    def loss():
        mean, log_var, drawn = call(encoder, x)
        kl = ops.exp(log_var) + mean**2 - 1 - log_var
        # This is a mean over very many pixels.
        return error(decoder(drawn), x) * 1e-6 + 1e-7 * ops.mean(kl)

    return gradients_of(loss, encoder)


def through_another(another, call, make):
    """Takes gradients of a model whose changed result is `another`'s input."""
    model = network(outputs=8)
    return gradients_of(
        lambda: error(another(make(call(model, X))), 2.0), model
    )


@form
def one_tensor_given_twice(call):
    inputs = [keras.Input((8,)), keras.Input((8,))]
    hidden = [layers.Dense(16, "tanh")(one) for one in inputs]
    another = keras.Model(inputs, layers.Dense(1)(ops.add(*hidden)))
    return through_another(another, call, lambda h: [h, h])


class Film(keras.Model):
    """Takes complex numbers, and a scale from an attribute."""

    by = 1.0

    def __init__(self):
        super().__init__()
        self.hidden, self.last = layers.Dense(32, "tanh"), layers.Dense(1)

    def call(self, z):
        hidden = self.hidden(ops.concatenate([ops.real(z), ops.imag(z)], -1))
        return self.last(hidden * ops.cast(self.by, hidden.dtype))


@form
def complex_argument(call):
    another, turned = Film(), np.complex64(1 + 0.5j)
    another(np.ones((1, 8), "complex64"))
    return through_another(
        another, call, lambda h: ops.cast(h, "complex64") * turned
    )


class Around(keras.Model):
    """A user's own model around another."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.built = True

    def call(self, x):
        return self.inner(x)


class Memory(keras.Model):
    """Uses its earlier results, through an attribute."""

    def __init__(self):
        super().__init__()
        self.cell, self.last = layers.Dense(8, "tanh"), layers.Dense(1)
        self.cell.build((None, 24))
        self.last.build((None, 8))
        self.built = True

    def call(self, x):
        memory = ops.cast(self.memory, x.dtype)
        self.memory = self.cell(ops.concatenate([x, memory], -1))
        return self.last(self.memory)


@only_under("tensorflow")
def memory_between_calls(call):
    model, first = Memory(), network(outputs=8)

    def loss():
        model.memory = first(X)
        model(0.5 * X)
        return error(model(X))

    return gradients_of(loss, first, model)


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


def forces(call, energy):
    model = Forces(energy)

    def loss():
        found, forces = call(model, tf.constant(X))
        return error(found) + error(forces, 0.1)

    return gradients_of(loss, model)


@only_under("tensorflow")
def forces_by_a_sequential(call):
    return forces(call, network())


@only_under("tensorflow")
def one_output_by_another(call):
    """Computes Grad-CAM, as in Keras's example."""
    inputs = keras.Input((12, 12, 3))
    last = layers.Conv2D(8, 3, activation="tanh")(inputs)
    pooled = layers.GlobalAveragePooling2D()(layers.Conv2D(8, 3)(last))
    model = keras.Model(inputs, [last, layers.Dense(5)(pooled)])
    x = np.random.default_rng(0).normal(size=(4, 12, 12, 3)).astype("float32")

    def gradients():
        with tf.GradientTape() as tape:
            activations, scores = call(model, x)
            best = scores[:, 0]
        return [tape.gradient(best, activations)]

    return gradients, ()


@only_under("tensorflow")
def a_variable_as_input(call):
    """Optimizes an input, as in style transfer or a search for a latent."""
    latent, models = tf.Variable(X), (network(), Around(network()))

    def gradients():
        with tf.GradientTape(persistent=True) as tape:
            losses = [error(call(model, latent)) for model in models]
        return [tape.gradient(loss, latent) for loss in losses]

    return gradients, ()


class Pooled(keras.Model):
    def __init__(self):
        super().__init__()
        self.last = layers.Dense(1)
        self.last.build((None, 8))
        self.built = True

    def call(self, x):
        return self.last(tf.reduce_sum(x, axis=1))


@only_under("tensorflow")
def ragged_argument(call):
    def ragged(h):
        return tf.RaggedTensor.from_row_splits(h, [0, 3, 10, 64])

    return through_another(Pooled(), call, ragged)


def of_weights(function, *models):
    """Returns a form's result for a function of the weights (JAX)."""
    weights = [v for model in models for v in model.trainable_variables]
    return lambda: function([v.value for v in weights]), weights


def called(model, weights, x, **how):
    return model.stateless_call(weights, frozen(model), x, **how)[0]


@only_under("jax")
def sharded_over_a_mesh(_):
    model = network()
    devices = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("batch",))
    everywhere, by_row = jax.P(), jax.P("batch")

    def of_shard(weights, x, y):
        def loss(weights):
            return jax.lax.pmean(error(called(model, weights, x), y), "batch")

        return jax.grad(loss)(weights)

    sharded = jax.shard_map(
        of_shard,
        mesh=devices,
        in_specs=(everywhere, by_row, by_row),
        out_specs=everywhere,
    )
    return of_weights(lambda weights: sharded(weights, X, Y), model)


@only_under("jax")
def a_checkpoint_around_the_model(_):
    model = network()
    checkpointed = jax.checkpoint(lambda weights: called(model, weights, X))
    return of_weights(jax.grad(lambda w: error(checkpointed(w))), model)


@only_under("jax")
def accumulated_in_a_scan(_):
    model = network()

    def loss(weights):
        def add(total, pair):
            x, y = pair
            return total + error(called(model, weights, x), y) / 4, None

        pairs = jnp.reshape(X, (4, 16, 16)), jnp.reshape(Y, (4, 16, 1))
        return jax.lax.scan(add, 0.0, pairs)[0]

    return of_weights(jax.grad(loss), model)


def in_training():
    """Returns a model's call with dropout, a direction of its input, it."""
    model = classifier(rate=0.1)
    along = np.random.default_rng(2).normal(size=X.shape).astype("float32")
    call = functools.partial(called, model, training=True)
    return call, jnp.asarray(along), model


@only_under("jax")
def jacobian_in_forward_mode(_):
    of, along, model = in_training()

    def gradients(weights):
        return [jax.jacfwd(lambda by: of(weights, X + by * along))(1.0)]

    return of_weights(gradients, model)


@only_under("jax")
def hessian_times_a_vector(_):
    of, _, model = in_training()

    def gradients(weights):
        ones = [jnp.ones_like(weight) for weight in weights]
        slope = jax.grad(lambda weights: 1e-6 * error(of(weights, X)))
        return jax.jvp(slope, (weights,), (ones,))[1]

    return of_weights(gradients, model)


@only_under("jax")
def gauss_newton_times_a_vector(_):
    of, _, model = in_training()

    def gradients(weights):
        ones = [jnp.ones_like(weight) for weight in weights]
        made, push = jax.linearize(jax.jit(lambda w: of(w, X)), weights)
        pull = jax.linear_transpose(push, weights)
        return pull(1e-6 * push(ones) / made.size)[0]

    return of_weights(gradients, model)


@only_under("jax")
def loss_on_a_tangent(_):
    """Computes the loss of consistency models and mean flows."""
    of, along, model = in_training()

    def loss(weights):
        made, along_x = jax.jvp(lambda x: of(weights, x), (X,), (along,))
        return 1e-3 * jnp.mean(made**2 + along_x**2)

    return of_weights(jax.grad(loss), model)


@only_under("jax")
def tensor_held_by_a_layer(_):
    model, first = Film(), network(outputs=32)
    model(X * (1 + 0.5j))

    def loss(weights):
        model.by = called(first, weights[4:], X)
        turned = weights[0].sum() * X * (1 + 0.5j)
        return error(called(model, weights[:4], turned))

    return of_weights(jax.grad(loss), model, first)


@only_under("jax")
def weights_assigned_without_a_scope(_):
    model = network()
    known = values_of(model)

    def loss(weights):
        for variable, value in zip(
            model.trainable_variables, weights, strict=True
        ):
            variable.assign(value)
        return 1e-6 * error(model(X))

    def gradients(weights):
        found = jax.grad(loss)(weights)
        for variable, value in zip(
            model.trainable_variables, known, strict=True
        ):
            variable.assign(value)
        return found

    return of_weights(gradients, model)


def gradients_under(policy, function, mode):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    tfmix.set_global_policy(policy)
    if mode == "nested":
        compiled = functools.cache(tf.function)
        gradients, _ = function(lambda m, x, **how: compiled(m)(x, **how))
    else:
        gradients, weights = function(call)
    if ON_JAX and mode == "jit":
        of = jax.jit(at_weights(gradients, weights))
        found = of([v.value for v in weights])
    elif mode == "eager":
        found = gradients()
    else:
        found = tf.function(gradients, jit_compile=mode == "jit")()
    return [ops.convert_to_numpy(each) for each in found]


def errors(right, found):
    """Returns each gradient's distance from the right one, by its norm."""
    return [
        float(np.linalg.norm(a - b) / np.linalg.norm(a))
        for a, b in zip(right, found, strict=True)
    ]


def cases():
    for name in FORMS:
        for mode in MODES[: 3 if name in NOT_NESTED else 4]:
            case = f"{name}-{mode}"
            marks = [] if case in QUICK else [pytest.mark.slow]
            yield pytest.param(name, mode, marks=marks, id=case)


@pytest.mark.every_case("each form is a behaviour of its own")
@pytest.mark.parametrize(("name", "mode"), list(cases()))
def test_gradients_are_those_of_float32(name, mode):
    right = gradients_under("float32", FORMS[name], mode)
    found = gradients_under("mixed_float16", FORMS[name], mode)
    assert {each.dtype.name for each in found} == {"float32"}
    assert max(errors(right, found)) < WITHIN, errors(right, found)


def test_an_error_of_one_percent_in_one_gradient_shows():
    right = gradients_under("float32", FORMS["summed_loss"], "eager")
    found = [*right[:-1], right[-1] * 1.01]
    assert max(errors(right, found)) > WITHIN


@pytest.mark.parametrize("exponent", [-60, -24, 15, 60])
@pytest.mark.parametrize("mode", MODES)
def test_a_power_of_two_in_front_of_a_loss_changes_no_bit(exponent, mode):
    one, scaled = (
        gradients_under("mixed_float16", summed(factor), mode)
        for factor in (1.0, 2.0**exponent)
    )
    for right, found in zip(one, scaled, strict=True):
        np.testing.assert_array_equal(found / 2.0**exponent, right)
