"""The optimizer's step, compiled for an H200 and a v5e."""

import math

import keras
import pytest
from keras import layers, ops

import tfmix
from benchmarks import compiled_steps, compiled_tensorflow, overhead
from tests import helpers
from tests.tools.hardware.programs import skip_without
from tfmix.tools.hardware import compiled_text, compilers
from tfmix.tools.hardware import target as targets

FEW, MANY = compiled_steps.FEW_LARGE, compiled_steps.MANY_SMALL


WRAPPERS = overhead.SYSTEMS | {
    "8 bits": lambda optimizer: tfmix.optimizers.LowMemoryOptimizer(
        optimizer, seed=1
    ),
    "8 bits, scaled": lambda optimizer: tfmix.LossScaleOptimizer(
        tfmix.optimizers.LowMemoryOptimizer(optimizer, seed=1)
    ),
}


def compiled(shapes, target, way="tfmix", dtype="float32"):
    skip_without(target)
    adam = WRAPPERS[way](keras.optimizers.Adam())
    made = compiled_steps.compiled(adam, shapes, target, dtype)
    return made, compiled_text.read(made.text)


def check(made, program, kernels):
    """Asserts that a GPU is busy all the time."""
    assert program.conditionals == 0, "the GPU waits for the host"
    assert program.copies <= 4
    assert program.kernels <= kernels, "too many kernels"
    assert made.extra <= 2e6


# An unwrapped optimizer has a kernel per variable, and one for its counters.
@pytest.mark.parametrize(
    ("shapes", "kernels"),
    [(FEW, 7 + 11), (MANY, 201 + 20)],
    ids=["few large", "many small"],
)
def test_an_h200_neither_waits_nor_copies(shapes, kernels):
    check(*compiled(shapes, "h200"), kernels)


@pytest.mark.parametrize(
    ("way", "each"), [("8 bits", 2), ("8 bits, scaled", 4)]
)
def test_8_bit_state_is_never_whole_in_float32(way, each):
    made, program = compiled(MANY[:20], "h200", way)
    assert program.conditionals == 0
    assert program.kernels <= each * 20 + 15
    # Both moments of all variables are 10.5 MB in float32.
    assert made.extra <= 4e6


# A TPU stores another axis than the last one as the last, for most of these.
MIXED = [(512, 16, 80), (16, 80, 512), (500, 1000), (3, 3, 128, 256)]


@pytest.mark.parametrize("target", ["v5e", "h200"])
def test_8_bit_state_of_any_layout_moves_fewer_bytes_than_adam(target):
    _, bare = compiled(MIXED, target, "bare")
    made, program = compiled(MIXED, target, "8 bits")
    assert program.bytes < bare.bytes
    assert program.kernels <= 6 * len(MIXED) + 4
    assert made.extra <= 4e6


# TensorFlow takes long to lower many variables.
V5E_MANY = MANY if keras.backend.backend() == "jax" else MANY[:50]


@pytest.mark.parametrize(
    ("shapes", "kernels"),
    [(FEW, 6 + 20), (V5E_MANY, len(V5E_MANY) + 40)],
    ids=["few large", "many small"],
)
def test_a_v5e_accesses_little_more_than_the_gradients_again(shapes, kernels):
    bare, _ = compiled(shapes, "v5e", "bare")
    made, program = compiled(shapes, "v5e")
    assert program.conditionals == 0
    assert program.kernels <= kernels
    added = made.accessed - bare.accessed
    # The gradients are in bfloat16.
    assert added <= 2 * 2 * sum(math.prod(shape) for shape in shapes)
    # For many small gradients under TensorFlow, Keras's scaler also needs only
    # one pass.
    if keras.backend.backend() == "jax" or shapes == FEW:
        by_keras, _ = compiled(shapes, "v5e", "Keras")
        assert added <= (by_keras.accessed - bare.accessed) / 3


def sparse(optimizer, target):
    """Compiles a step on 1024 rows of a 1,000,000 x 64 table (TensorFlow)."""
    import tensorflow as tf

    initial = keras.initializers.Zeros()
    table = keras.Variable(initial, shape=(1_000_000, 64), name="table")
    optimizer.build([table])
    device = compilers.device(targets.find(target))

    @tf.function(jit_compile=True, autograph=False)
    def step(values, ids):
        compiled_steps.say_scaled(optimizer)
        slices = tf.IndexedSlices(values, ids, tf.constant([1_000_000, 64]))
        optimizer.apply([slices], [table])

    given = [
        tf.TensorSpec((1024, 64), tf.float32),
        tf.TensorSpec((1024,), tf.int32),
    ]
    return compiled_tensorflow.compiled(step, given, device)


@helpers.requires_backend("tensorflow")
def test_sparse_gradients_are_checked_without_a_loop():
    skip_without("h200")
    found = {}
    for way in ("bare", "tfmix"):
        optimizer = WRAPPERS[way](keras.optimizers.SGD())
        made = sparse(optimizer, "h200")
        found[way] = compiled_text.read(made.text)
    assert found["tfmix"].conditionals == 0
    # A loop would launch kernels for each of 1024 rows.
    assert found["tfmix"].kernels <= found["bare"].kernels + 20


def dense_and_batch_norm():
    x = inputs = keras.Input((256,))
    for _ in range(3):
        x = layers.Dense(512)(x)
        x = layers.BatchNormalization()(x)
        x = layers.Activation("relu")(x)
        x = layers.Dropout(0.1)(x)
    return keras.Model(inputs, layers.Dense(10, dtype="float32")(x))


def softmax_in_float32():
    return keras.Sequential(
        [
            keras.Input((256,)),
            layers.Dense(512, "relu"),
            layers.BatchNormalization(),
            layers.Dense(10, "softmax", dtype="float32"),
        ]
    )


class Normalizes(layers.Layer):
    """A user's own layer normalization."""

    def call(self, x):
        gap = x - ops.mean(x, -1, keepdims=True)
        variance = ops.mean(ops.square(gap), -1, keepdims=True)
        return gap / ops.sqrt(variance + 1e-6)


def normalized_by_own_code():
    x = inputs = keras.Input((64, 256))
    for _ in range(2):
        x = x + layers.Dense(256)(Normalizes()(x))
    return keras.Model(inputs, layers.Dense(10, dtype="float32")(x))


def recurrent():
    inputs = keras.Input((32, 64))
    outputs = layers.LSTM(64)(inputs)
    return keras.Model(inputs, layers.Dense(10, dtype="float32")(outputs))


# The kernels that `fit` launched, and the megabytes that it moved, before the
# guard counted reports, losses used logits and small numbers were kept.
STEPS = {
    dense_and_batch_norm: (91, 41.57),
    softmax_in_float32: (44, 9.10),
    normalized_by_own_code: (51, 73.63),
}
if keras.backend.backend() == "jax":
    STEPS = {
        dense_and_batch_norm: (86, 41.51),
        softmax_in_float32: (41, 8.26),
        normalized_by_own_code: (48, 73.70),
        recurrent: (1160, 52.50),
    }


@pytest.mark.parametrize("build", STEPS)
def test_a_step_of_fit_launches_no_more_kernels_and_moves_no_more(build):
    skip_without("h200")
    with tfmix.policy_scope("mixed_float16"):
        model = build()
    from_logits = build is not softmax_in_float32
    model.compile(
        "adam",
        keras.losses.SparseCategoricalCrossentropy(from_logits=from_logits),
        metrics=["accuracy"],
    )
    device = compilers.device(targets.find("h200"))
    made = compiled_tensorflow.training_step(model, 32, device)
    program = compiled_text.read(made.text)
    kernels, megabytes = STEPS[build]
    assert program.kernels <= kernels
    assert program.bytes <= 1e6 * megabytes
    assert program.conditionals == 0
