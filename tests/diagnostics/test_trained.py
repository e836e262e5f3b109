"""The suggested policy trains like float32, if float32 trains well.

The faults are those of `faults.py`. The models have a shortcut around each
block, a learnable target and enough steps for the loss to fall.
"""

import keras
import numpy as np
import pytest
from keras import layers, ops

from tests.diagnostics import faults
from tfmix.conversion import convert, planned_policies
from tfmix.diagnostics import check
from tfmix.loss_scaling import optimizer as scaling

STEPS, ROWS, WIDTH, BLOCKS = 40, 64, faults.WIDTH, 12
# A loss counts as that of float32 if it differs by less.
CLOSE = 0.01


class Share(layers.Layer):
    """Scales the outputs of a block, which are added to the shortcut."""

    def call(self, inputs):
        return inputs * 0.3


def around(hidden, parts):
    """Adds the outputs of some layers to their input."""
    inner = hidden
    for part in parts:
        inner = part(inner)
    return layers.Add()([hidden, Share()(inner)])


def dense():
    return [layers.Dense(WIDTH, "tanh")]


def head(hidden):
    for layer in faults.head():
        hidden = layer(hidden)
    return hidden


def learnable(rng, shape):
    """Returns inputs, and targets that are a smooth function of them."""
    x = rng.normal(size=(ROWS, *shape)).astype("float32")
    flat = x.reshape(ROWS, -1)
    map_ = rng.normal(size=(flat.shape[-1], 3)) / flat.shape[-1] ** 0.5
    return x, np.tanh(2.0 * flat @ map_).astype("float32") + 0.5


def regression(rng, shape, planted, make=dense, blocks=BLOCKS, first=False):
    """Plants layers in one of several blocks, each with a shortcut."""
    place = 0 if first else int(rng.integers(0, blocks))
    inputs = hidden = keras.Input(shape)
    for index in range(blocks):
        hidden = around(hidden, planted if index == place else make())
    hidden = layers.LayerNormalization()(hidden)
    model = keras.Model(inputs, head(hidden))
    return faults.Case(model, *learnable(rng, shape), "mse")


def activation_overflow(rng):
    form = rng.choice(["dense", "exponential", "conv", "power"])
    shape, make = (WIDTH,), dense
    if form == "conv":
        shape = (6, 6, WIDTH)

        def make(**settings):
            return [layers.Conv2D(WIDTH, 3, padding="same", **settings)]

        planted = make(name="planted", kernel_initializer=faults.loud(3e5))
    elif form == "power":
        planted = [faults.Power(name="planted")]
    elif form == "exponential":
        start = {"bias_initializer": keras.initializers.Constant(13.0)}
        planted = [layers.Dense(WIDTH, form, name="planted", **start)]
    else:
        start = {"kernel_initializer": faults.loud(5e5)}
        planted = [layers.Dense(WIDTH, "relu", name="planted", **start)]
    planted.append(layers.LayerNormalization())
    return regression(rng, shape, planted, make)


def attention_without_scaling(rng):
    form = rng.choice(["matmul", "einsum"])
    layer = faults.Heads(0.01, form, name="planted")
    # The scores are 75,000 and differ by a few. If they differed by thousands,
    # two trainings in float32 would end 10 % apart.
    offset = (75_000.0 / (WIDTH if form == "matmul" else WIDTH // 2)) ** 0.5
    for part in (layer.query, layer.key):
        part.bias_initializer = keras.initializers.Constant(offset)
        part.trainable = False
    return regression(rng, (5, WIDTH), [layer], blocks=4)


def variance_of_an_offset(rng):
    return regression(rng, (WIDTH,), faults.normalized_offset(rng))


def loss_over_pixels(rng):
    form = rng.choice(["squares", "absolute", "per row"])

    def loss(y_true, y_pred):
        if form == "absolute":
            return ops.sum(ops.abs(y_true - y_pred))
        squares = ops.square(y_true - y_pred)
        return ops.sum(squares, None if form == "squares" else (1, 2, 3))

    inputs = keras.Input((64, 64, 1))
    hidden = layers.Conv2D(4, 3, padding="same")(inputs)
    for _ in range(int(rng.integers(0, 3))):
        made = layers.Conv2D(4, 3, padding="same", activation="silu")
        hidden = around(hidden, [made])
    model = keras.Model(inputs, layers.Conv2D(1, 3, padding="same")(hidden))
    x = rng.normal(size=(16, 64, 64, 1)).astype("float32")
    return faults.Case(model, x, x + 5.0, loss, "loss", rate=0.02)


def vanishing_gradient(rng):
    form = rng.choice(["gate", "chain"])
    inputs = hidden = keras.Input((WIDTH,))
    for _ in range(int(rng.integers(1, 4))):
        hidden = around(hidden, dense())
    hidden = faults.Faint(form, name="planted")(hidden)
    for _ in range(int(rng.integers(0, 3))):
        hidden = around(hidden, dense())
    model = keras.Model(inputs, head(hidden))
    # Adam makes a whole step of small gradients, if its epsilon is smaller.
    data = learnable(rng, (WIDTH,))
    return faults.Case(model, *data, "mse", epsilon=1e-20)


def epsilon_of_1e_8(rng):
    form = rng.choice(["self", "l2", "maximum", "log"])
    planted = [layers.ReLU(), faults.Guarded(form, name="planted")]
    # If the divided values change in training, one that crosses 0 jumps.
    jumps = form in ("self", "log")
    case = regression(rng, (WIDTH,), planted, blocks=6, first=jumps)
    case.x[2] = 0.0
    return case


def embedding_row_of_1e5(rng):
    layer, inputs = faults.table(rng), keras.Input((4,), dtype="int32")
    hidden = layers.LayerNormalization()(layer(inputs))
    for _ in range(int(rng.integers(1, 5))):
        hidden = around(hidden, dense())
    model = keras.Model(inputs, head(hidden))
    x = faults.with_a_large_row(rng, layer, ROWS)
    return faults.Case(model, x, np.sin(x[:, :3] * 0.7, dtype="float32"), "mse")


# The same kinds of fault, in models that can be trained.
KINDS = {kind: globals()[kind] for kind in faults.KINDS}


def losses(case, scale):
    """Trains with Adam and returns the loss of each step."""
    keras.utils.set_random_seed(0)
    inner = keras.optimizers.Adam(case.rate, epsilon=case.epsilon)
    optimizer = scaling.LossScaleOptimizer(inner, initial_scale=scale)
    # Otherwise JAX would compile each operation, which takes minutes.
    jit = keras.backend.backend() == "jax"
    case.model.compile(optimizer, case.loss, jit_compile=jit)
    history = case.model.fit(
        case.x,
        case.y,
        batch_size=len(case.x),
        epochs=STEPS,
        shuffle=False,
        verbose=0,
    )
    return history.history["loss"]


def assign(model, values):
    for variable, value in zip(model.variables, values, strict=True):
        variable.assign(value)


def in_dtypes(model, dtypes):
    for layer, dtype in dtypes.items():
        object.__setattr__(layer, "_dtype_policy", dtype)


def in_float32(case, weights):
    """Trains in float32 from given weights, and restores the model."""
    model = case.model
    before = {layer: layer._dtype_policy for layer in model._flatten_layers()}
    start = [np.array(variable) for variable in model.variables]
    in_dtypes(model, planned_policies.reference(model))
    assign(model, weights)
    found = losses(case, 1.0)
    in_dtypes(model, before)
    assign(model, start)
    return found


def nudged(weights):
    """Returns weights that differ by the rounding of float16."""
    generator = np.random.default_rng(0)
    return [
        value * (1 + generator.normal(size=value.shape) * 2.0**-12)
        if value.dtype == np.float32
        else value
        for value in weights
    ]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_the_suggestion_trains_to_the_loss_of_float32(kind, seed):
    case = faults.plant(kind, seed, KINDS)
    weights = [np.array(variable) for variable in case.model.variables]
    exact = in_float32(case, weights)
    again = in_float32(case, nudged(weights))
    # The comparison is only valid if the loss falls far, and repeatably.
    assert exact[-1] < 0.7 * exact[0]
    assert again[-1] == pytest.approx(exact[-1], rel=CLOSE / 2)
    report = check.check(case.model, case.x, case.y, loss=case.loss)
    assert report.rows[0].layer == case.layer
    policy = report.suggested_policy(progress=False)
    assert report.again(policy).healthy
    convert.apply_policy(case.model, policy)
    found = losses(case, 2.0**15)
    assert case.model.optimizer.skipped_steps == 0
    assert found[-1] == pytest.approx(exact[-1], rel=CLOSE)
