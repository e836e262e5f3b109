"""Joining gradients changes what a step costs, not what it does."""

import keras
import numpy as np
import pytest

from tests import helpers
from tfmix.scaling import optimizer as optimizers
from tfmix.scaling.step import unscale


def arrays():
    rng = np.random.default_rng(0)
    shapes = [(3, 2), (2,), (3, 2), (), (2,), (3, 2)]
    return [np.asarray(rng.normal(size=s), "float32") for s in shapes]


def tensors(values):
    return [
        None if v is None else keras.ops.convert_to_tensor(v) for v in values
    ]


def test_blocks_come_apart_in_the_order_they_went_in():
    values = arrays()
    values[1] = None
    made = unscale.unscaled(tensors(values), [None] * 6, np.float32(4.0))
    for part, value in zip(unscale.parts(made, 6), values, strict=True):
        if value is None:
            assert part is None
        else:
            helpers.assert_same_bits(part, value / np.float32(4.0))


@pytest.mark.parametrize("bad", range(6))
def test_the_one_bad_gradient_is_found_at_its_own_place(bad):
    values = arrays()
    values[bad] = np.full_like(values[bad], np.nan)
    values[(bad + 1) % 6] = None
    made = unscale.unscaled(tensors(values), [None] * 6, np.float32(1.0))
    assert not bool(unscale.all_finite(made))
    flags = keras.ops.convert_to_numpy(unscale.not_finite(made, 6)).tolist()
    assert flags == [position == bad for position in range(6)]


@pytest.mark.filterwarnings("ignore:The gradients are divided")
def test_a_step_on_some_variables_blames_the_right_ones():
    names = ["a", "b", "c"]
    model = [keras.Variable(np.zeros(2, "float32"), name=n) for n in names]
    wrapped = optimizers.LossScaleOptimizer("sgd")
    wrapped.build(model)
    good, bad = tensors([np.ones(2, "float32"), np.full(2, np.inf, "float32")])
    wrapped.apply([bad, good], [model[2], model[0]])
    assert list(wrapped.overflow_counts.values()) == [0, 0, 1]


@helpers.requires_backend("tensorflow")
@pytest.mark.parametrize(
    "name", ["SGD", pytest.param("Adam", marks=pytest.mark.slow)]
)
def test_five_hundred_variables_cost_less_than_one_operation_for_two(name):
    import tensorflow as tf

    def operations(optimizer):
        shapes = [(8, 8) if n % 2 else (8,) for n in range(500)]
        model = [keras.Variable(np.zeros(s, "float32")) for s in shapes]
        optimizer.build(model)

        @tf.function(autograph=False)
        def step(*grads):
            optimizer.apply(list(grads), model)

        specs = [tf.TensorSpec(shape) for shape in shapes]
        graph = step.get_concrete_function(*specs).graph.as_graph_def()
        functions = graph.library.function
        return len(graph.node) + sum(len(f.node_def) for f in functions)

    inner = getattr(keras.optimizers, name)
    bare = operations(inner())
    wrapped = optimizers.LossScaleOptimizer(inner())
    helpers.takes_scaled_gradients(wrapped)
    assert operations(wrapped) - bare <= 500 / 2 + 20
