"""XLA compiles a step without branches, and it decides as without XLA."""

import keras
import numpy as np
import pytest

from tests import helpers, steps
from tfmix.loss_scaling import optimizer as optimizers


# `promises/test_users_programs.py` has JAX's program, `tools/hardware` those of
# accelerators.
@helpers.requires_backend("tensorflow")
def test_the_skip_is_not_a_branch():
    import tensorflow as tf

    model = [keras.Variable(np.zeros((256, 128), "float32"))]
    optimizer = optimizers.LossScaleOptimizer(keras.optimizers.Adam())
    optimizer.build(model)
    helpers.takes_scaled_gradients(optimizer)

    @tf.function(autograph=False, jit_compile=True)
    def step(grads):
        optimizer.apply(grads, model)

    grads = [tf.ones(v.shape) for v in model]
    program = step.experimental_get_compiler_ir(grads)(stage="optimized_hlo")
    assert " conditional(" not in program


# A number of an unscaled gradient, the loss scale by which float32 multiplies
# it, and whether the step is applied.
STEPS = [
    (3e38, 1.0, True),  # Its square overflows; it does not.
    (6e38, 0.5, False),  # This is finite until it is divided.
    (3.2e38, 0.5, True),
    (-np.inf, 0.5, False),
    (np.nan, 2.0, False),
    (5e-46, 2.0, True),
    *[(2.0**-20, scale, True) for scale in (2.0**-100, 3.0, 2.0**64, 2.0**100)],
]


@pytest.mark.parametrize("mode", steps.MODES[1:])
@pytest.mark.parametrize(("value", "scale", "applied"), STEPS)
def test_the_check_never_decides_wrongly(mode, value, scale, applied):
    variable = keras.Variable(np.zeros(4, "float32"))
    sgd = keras.optimizers.SGD(0.01)
    optimizer = optimizers.LossScaleOptimizer(sgd, loss_scale=scale)
    helpers.takes_scaled_gradients(optimizer)
    true = np.float64([1.5, -0.25, 0.0, value])
    step = steps.stepper(optimizer, [variable], mode)
    step([np.float32(true * scale)])
    moved = -0.01 * true if applied else 0 * variable.numpy()
    np.testing.assert_allclose(variable, moved, rtol=1e-6, atol=1e-45)
    assert optimizer.skipped_steps == (not applied)


# Keras divides the sparse gradients of the first two.
SPARSE = {
    "rmsprop, momentum": lambda: keras.optimizers.RMSprop(0.01, momentum=0.5),
    "adadelta": lambda: keras.optimizers.Adadelta(0.5),
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "adam": lambda: keras.optimizers.Adam(0.01),
}


@pytest.mark.costly
@helpers.requires_backend("tensorflow")
@pytest.mark.parametrize("inner", SPARSE)
def test_an_embedding_trains_and_skips_under_xla_as_without(inner):
    import tensorflow as tf

    def trained(jit):
        table = keras.Variable(np.ones((6, 2), "float32"))
        optimizer = optimizers.LossScaleOptimizer(
            SPARSE[inner](), loss_scale=4.0
        )
        optimizer.build([table])
        helpers.takes_scaled_gradients(optimizer)

        @tf.function(jit_compile=jit)
        def step(values):
            rows = tf.constant([1, 1, 3])
            shape = tf.constant([6, 2])
            optimizer.apply([tf.IndexedSlices(values, rows, shape)], [table])

        for size in (1.0, np.inf, 2.0):
            step(tf.fill((3, 2), tf.constant(size, tf.float32)))
        assert optimizer.skipped_steps == 1
        return [
            v.numpy() for v in [table, *optimizer.inner_optimizer.variables]
        ]

    for compiled, expected in zip(trained(True), trained(False), strict=True):
        np.testing.assert_allclose(compiled, expected, rtol=1e-6)
        assert np.isfinite(expected).all()
