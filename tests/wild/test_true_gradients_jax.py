"""Gradients that you take with JAX are those of float32.

Every form runs unchanged, in float32 and with one line before it.
"""

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfmix

if keras.backend.backend() != "jax":
    pytest.skip("test_true_gradients.py", allow_module_level=True)

import jax
import jax.numpy as jnp

# float16's own rounding errors are below this, even when they add up.
WITHIN = 0.005
MODES = ("eager", "jit")
# The tangent takes ten seconds op by op.
QUICK = {
    ("mean_over_many_pixels", "eager"),
    ("penalty_on_a_gradient_of_weights", "jit"),
    ("sharded_over_a_mesh", "jit"),
    ("loss_on_a_tangent", "jit"),
}
X = np.random.default_rng(0).normal(size=(64, 16)).astype("float32")
# Targets are not around 0, where the sum for a bias would cancel.
Y = np.random.default_rng(1).normal(3.0, size=(64, 1)).astype("float32")
FORMS = {}


def form(function):
    """Registers a function that returns a gradient function and weights."""
    FORMS[function.__name__] = function
    return function


def network(inputs=16, outputs=1, **first):
    return keras.Sequential(
        [
            keras.Input((inputs,)),
            layers.Dense(32, "tanh", **first),
            layers.Dense(outputs),
        ]
    )


def weights_of(*models):
    return [v.value for m in models for v in m.trainable_variables]


def called(model, weights, x, **how):
    frozen = [v.value for v in model.non_trainable_variables]
    return model.stateless_call(weights, frozen, x, **how)[0]


def squares(model, weights):
    return (called(model, weights, X) - Y) ** 2


@form
def mean_over_many_pixels():
    model = keras.Sequential(
        [
            keras.Input((3072,)),
            layers.Dense(32, "tanh"),
            layers.Dense(3072, "sigmoid"),
        ]
    )
    x = np.random.default_rng(0).random((64, 3072), "float32")

    def loss(weights):
        return jnp.mean((called(model, weights, x) - x) ** 2)

    return jax.grad(loss), weights_of(model)


def loss_of_heads():
    inputs = keras.Input((16,))
    trunk = layers.Dense(32, "tanh")(inputs)
    pixels = layers.Dense(4096)(layers.Dense(16, "tanh")(trunk))
    number = layers.Dense(1)(layers.Dense(16, "tanh")(trunk))
    model = keras.Model(inputs, {"number": number, "pixels": pixels})

    def loss(weights):
        found = called(model, weights, X)
        faint = jnp.mean((found["pixels"] - 1.0) ** 2)
        return jnp.mean((found["number"] - Y) ** 2) + 1e-6 * faint

    return loss, weights_of(model)


@form
def heads_of_unlike_losses():
    loss, weights = loss_of_heads()
    return jax.grad(loss), weights


@form
def penalty_on_heads_of_unlike_losses():
    loss, weights = loss_of_heads()

    def penalty(weights):
        slopes = jax.grad(loss)(weights)
        return sum(jnp.sum(slope**2) for slope in slopes)

    return jax.grad(penalty), weights


class LeavesScores(layers.Layer):
    """Leaves a value on itself that a loss uses besides the results."""

    def call(self, x):
        self.scores = ops.cast(x, "float32")
        return ops.tanh(x)


def loss_of_scores():
    scoring = LeavesScores()
    model = keras.Sequential(
        [keras.Input((16,)), layers.Dense(32), scoring, layers.Dense(1)]
    )

    def loss(weights):
        error = jnp.mean(squares(model, weights))
        return 1e-6 * (error + jnp.mean(scoring.scores**2))

    return loss, weights_of(model)


@form
def scores_left_on_a_layer():
    loss, weights = loss_of_scores()
    return jax.grad(loss), weights


@form
def hessian_of_scores_left_on_a_layer():
    loss, weights = loss_of_scores()

    def of_bias(bias):
        return loss([weights[0], bias, *weights[2:]])

    return lambda weights: [jax.hessian(of_bias)(weights[1])], weights


def of_tokens(use_bias):
    model = keras.Sequential(
        [
            keras.Input((64,), dtype="int32"),
            layers.Embedding(500, 32),
            layers.Dense(32, "tanh", use_bias=use_bias),
            layers.Dense(500, use_bias=use_bias),
        ]
    )
    x = np.random.default_rng(0).integers(0, 500, (64, 64)).astype("int32")
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def loss(weights):
        return loss_fn(np.roll(x, 1, 1), called(model, weights, x))

    return jax.grad(loss), weights_of(model)


@form
def rows_of_an_embedding():
    return of_tokens(use_bias=False)


@form
def biases_of_many_tokens():
    return of_tokens(use_bias=True)


def summed(factor):
    def of_factor():
        model = network()
        loss = jax.grad(lambda w: factor * jnp.sum(squares(model, w)))
        return loss, weights_of(model)

    return of_factor


FORMS["summed_loss"] = summed(1.0)
FORMS["loss_times_1e_6"] = summed(1e-6)
FORMS["loss_times_1e6"] = summed(1e6)


@form
def penalty_on_a_gradient_of_inputs():
    model = network()

    def loss(weights):
        def score(x):
            return jnp.sum(called(model, weights, x))

        norm = jnp.sqrt(jnp.sum(jax.grad(score)(jnp.asarray(X)) ** 2, -1))
        return jnp.mean((norm - 1.0) ** 2) + score(X) / 64

    return jax.grad(loss), weights_of(model)


@form
def penalty_on_a_gradient_of_weights():
    model = network()

    def loss(weights):
        slopes = jax.grad(lambda w: jnp.mean(squares(model, w)))(weights)
        return sum(jnp.sum(each**2) for each in slopes)

    return jax.grad(loss), weights_of(model)


@form
def three_derivatives():
    model = network(inputs=2)

    def loss(weights):
        def score(x):
            return called(model, weights, x[None])[0, 0]

        def slope(x):
            return jax.grad(score)(x)[0]

        return jnp.mean(jax.vmap(jax.grad(slope))(X[:, :2])[:, 0] ** 2)

    # Nothing reaches the last bias.
    return lambda w: jax.grad(loss)(w)[:-1], weights_of(model)


@form
def a_step_inside_of_the_loss():
    model = network()

    def loss(weights):
        return jnp.mean(squares(model, weights))

    def after_a_step(weights):
        slopes = jax.grad(loss)(weights)
        both = zip(weights, slopes, strict=True)
        return loss([w - 0.1 * s for w, s in both])

    return jax.grad(after_a_step), weights_of(model)


@form
def a_step_inside_of_each_task():
    model = network()
    tasks = jnp.reshape(X, (4, 16, 16)), jnp.reshape(Y, (4, 16, 1))

    def loss(weights, x, y):
        return jnp.mean((called(model, weights, x) - y) ** 2)

    def after_a_step(weights, x, y):
        slopes = jax.grad(loss)(weights, x, y)
        both = zip(weights, slopes, strict=True)
        return loss([w - 0.1 * s for w, s in both], x, y)

    def of_tasks(weights):
        return jnp.mean(jax.vmap(after_a_step, (None, 0, 0))(weights, *tasks))

    return jax.grad(of_tasks), weights_of(model)


@form
def a_stateless_scope():
    model = network()

    def loss(weights):
        mapping = zip(model.trainable_variables, weights, strict=True)
        with keras.StatelessScope(mapping):
            return jnp.mean((model(X) - Y) ** 2)

    return jax.grad(loss), weights_of(model)


@form
def each_example_by_jacobian():
    model = network()

    def losses(weights):
        return jnp.mean(squares(model, weights), -1)

    return jax.jacrev(losses), weights_of(model)


@form
def each_example_by_vmap():
    model = network()

    def loss(weights, x, y):
        return jnp.mean((called(model, weights, x[None]) - y[None]) ** 2)

    def gradients(weights):
        return jax.vmap(jax.grad(loss), (None, 0, 0))(weights, X, Y)

    return gradients, weights_of(model)


@form
def rematerialised_layers():
    with keras.RematScope("full"):
        hidden = [layers.Dense(32, "tanh"), layers.Dense(32, "tanh")]
    model = keras.Sequential([keras.Input((16,)), *hidden, layers.Dense(1)])
    return jax.grad(lambda w: jnp.mean(squares(model, w))), weights_of(model)


@form
def a_model_rematerialised_in_training():
    with keras.RematScope("full"):
        model = network()

    def loss(weights):
        guess = called(model, weights, X, training=True)
        return jnp.mean((guess - Y) ** 2)

    return jax.grad(loss), weights_of(model)


@form
def sharded_over_a_mesh():
    model = network()
    devices = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("batch",))
    everywhere, by_row = jax.P(), jax.P("batch")

    def of_shard(weights, x, y):
        def loss(weights):
            error = jnp.mean((called(model, weights, x) - y) ** 2)
            return jax.lax.pmean(error, "batch")

        return jax.grad(loss)(weights)

    sharded = jax.shard_map(
        of_shard,
        mesh=devices,
        in_specs=(everywhere, by_row, by_row),
        out_specs=everywhere,
    )
    return lambda weights: sharded(weights, X, Y), weights_of(model)


@form
def a_checkpoint_around_the_model():
    model = network()
    call = jax.checkpoint(lambda weights: called(model, weights, X))

    def loss(weights):
        return jnp.mean((call(weights) - Y) ** 2)

    return jax.grad(loss), weights_of(model)


@form
def accumulated_in_a_scan():
    model = network()

    def loss(weights):
        def add(total, pair):
            x, y = pair
            guess = called(model, weights, x)
            return total + jnp.mean((guess - y) ** 2) / 4, None

        pairs = jnp.reshape(X, (4, 16, 16)), jnp.reshape(Y, (4, 16, 1))
        return jax.lax.scan(add, 0.0, pairs)[0]

    return jax.grad(loss), weights_of(model)


@form
def two_models_in_a_row():
    first, second = network(outputs=8), network(inputs=8)

    def loss(weights):
        hidden = called(first, weights[:4], X)
        return jnp.mean((called(second, weights[4:], hidden) - Y) ** 2)

    return jax.grad(loss), weights_of(first, second)


def beside_added_losses(model, factor):
    def loss(weights):
        frozen = [v.value for v in model.non_trainable_variables]
        guess, _, added = model.stateless_call(
            weights, frozen, X, return_losses=True
        )
        return factor * jnp.mean((guess - Y) ** 2) + sum(added)

    return jax.grad(loss), weights_of(model)


@form
def activity_regularizer_beside_a_small_loss():
    model = network(activity_regularizer=keras.regularizers.L2(1e-3))
    return beside_added_losses(model, 1e-4)


class Added(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden, self.last = layers.Dense(32, "tanh"), layers.Dense(1)

    def call(self, x):
        hidden = self.hidden(x)
        self.add_loss(1e-3 * ops.mean(ops.square(hidden)))
        return self.last(hidden)


@form
def added_loss_beside_a_small_loss():
    model = Added()
    model(X)
    return beside_added_losses(model, 1e-5)


@form
def input_of_a_classifier_in_training():
    model = keras.Sequential(
        [
            keras.Input((16,)),
            layers.Dense(32, "tanh"),
            layers.BatchNormalization(),
            layers.Dense(4, "softmax"),
        ]
    )
    loss_fn = keras.losses.SparseCategoricalCrossentropy()

    def gradients(weights):
        def loss(x):
            guess = called(model, weights, x, training=True)
            return loss_fn(np.arange(64) % 4, guess)

        return [jax.grad(loss)(jnp.asarray(X))]

    return gradients, weights_of(model)


def classifier():
    model = keras.Sequential(
        [
            keras.Input((16,)),
            layers.Dense(32, "tanh"),
            layers.BatchNormalization(),
            layers.Dropout(0.1, seed=0),
            layers.Dense(4),
        ]
    )
    along = np.random.default_rng(2).normal(size=X.shape).astype("float32")

    def of(weights, x=X):
        return called(model, weights, x, training=True)

    return of, jnp.asarray(along), weights_of(model)


@form
def jacobian_in_forward_mode():
    of, along, weights = classifier()

    def gradients(weights):
        return [jax.jacfwd(lambda by: of(weights, X + by * along))(1.0)]

    return gradients, weights


@form
def hessian_times_a_vector():
    of, _, weights = classifier()

    def gradients(weights):
        def loss(weights):
            return 1e-6 * jnp.mean((of(weights) - Y) ** 2)

        ones = [jnp.ones_like(weight) for weight in weights]
        return jax.jvp(jax.grad(loss), (weights,), (ones,))[1]

    return gradients, weights


@form
def hessian_by_an_input():
    of, along, weights = classifier()

    def gradients(weights):
        def loss(by):
            return 1e-6 * jnp.mean(of(weights, X + by * along) ** 2)

        return [
            jax.hessian(loss)(1.0),
            jax.jvp(jax.grad(jax.grad(loss)), (1.0,), (1.0,))[1],
        ]

    return gradients, weights


@form
def gauss_newton_times_a_vector():
    of, _, weights = classifier()

    def gradients(weights):
        ones = [jnp.ones_like(weight) for weight in weights]
        made, push = jax.linearize(jax.jit(of), weights)
        pull = jax.linear_transpose(push, weights)
        return pull(1e-6 * push(ones) / made.size)[0]

    return gradients, weights


@form
def loss_on_a_tangent():
    of, along, weights = classifier()

    def loss(weights):
        """Computes the loss of consistency models and mean flows."""
        made, along_x = jax.jvp(lambda x: of(weights, x), (X,), (along,))
        return 1e-6 * jnp.mean(made**2 + along_x**2)

    return jax.grad(loss), weights


class Film(keras.Model):
    """Takes complex numbers, and a scale from an attribute."""

    by = 1.0

    def __init__(self):
        super().__init__()
        self.hidden, self.last = layers.Dense(32, "tanh"), layers.Dense(1)

    def call(self, z):
        hidden = self.hidden(jnp.concatenate([z.real, z.imag], -1))
        return self.last(hidden * ops.cast(self.by, hidden.dtype))


@form
def tensor_held_by_a_layer():
    model, first = Film(), network(outputs=32)
    model(X * (1 + 0.5j))

    def loss(weights):
        model.by = called(first, weights[4:], X)
        turned = weights[0].sum() * X * (1 + 0.5j)
        return jnp.mean((called(model, weights[:4], turned) - Y) ** 2)

    return jax.grad(loss), weights_of(model, first)


def gradients_under(policy, name, mode):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    tfmix.set_global_policy(policy)
    gradients, weights = FORMS[name]()
    if mode == "jit":
        gradients = jax.jit(gradients)
    return [np.asarray(each) for each in gradients(weights)]


def errors(right, found):
    """Returns each gradient's distance from the right one, by its norm."""
    return [
        float(np.linalg.norm(a - b) / np.linalg.norm(a))
        for a, b in zip(right, found, strict=True)
    ]


def cases():
    for name in FORMS:
        for mode in MODES:
            marks = [] if (name, mode) in QUICK else [pytest.mark.slow]
            yield pytest.param(name, mode, marks=marks, id=f"{name}-{mode}")


@pytest.mark.parametrize(("name", "mode"), list(cases()))
def test_gradients_are_those_of_float32(name, mode):
    right = gradients_under("float32", name, mode)
    found = gradients_under("mixed_float16", name, mode)
    assert all(each.dtype == "float32" for each in found)
    assert max(errors(right, found)) < WITHIN, errors(right, found)


def test_an_error_of_one_percent_in_one_gradient_shows():
    right = gradients_under("float32", "summed_loss", "jit")
    found = [*right[:-1], right[-1] * 1.01]
    assert max(errors(right, found)) > WITHIN
