"""Behaviour that all optimizers of 16-bit variables share."""

import warnings

import keras
import numpy as np
import pytest
from keras import ops

import tfmix
from tests import helpers, sixteen_bit
from tfmix._keras import version
from tfmix.optimizers import bfloat16_optimizer, float32_weights, master_weights

TENSORFLOW = helpers.requires_backend("tensorflow")


def built(way, inner, names="wb"):
    """Returns an optimizer of one way, built on variables of ones."""
    stored = [
        keras.Variable(np.ones(64), dtype="bfloat16", name=n) for n in names
    ]
    optimizer = sixteen_bit.WAYS[way](inner)
    optimizer.build(stored)
    return stored, optimizer


def array(value):
    return ops.convert_to_numpy(ops.cast(value, "float32"))


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("way", sixteen_bit.WAYS)
def test_variables_can_be_excluded_from_decay_after_the_build(way, by_name):
    sgd = keras.optimizers.SGD(0.5, weight_decay=0.5)
    (kernel, bias), optimizer = built(way, sgd, ("kernel", "bias"))
    exclude = optimizer.exclude_from_weight_decay
    arguments = {"var_names": ["bias"]} if by_name else {"var_list": [bias]}
    if way == "flat":
        with pytest.raises(ValueError, match=r"\['kernel'\].*\['bias'\]"):
            exclude(**arguments)
        return
    if version.numbers(keras.__version__) >= (3, 16):
        # Keras itself cannot exclude variables after the build.
        with pytest.raises(ValueError, match="before the optimizer is built"):
            exclude(**arguments)
        return
    exclude(**arguments)
    optimizer.apply([np.zeros(64, "float32")] * 2)
    assert (float(kernel[0]), float(bias[0])) == (0.75, 1.0)


def test_setting_one_value_keeps_assignments_to_others():
    sgd = keras.optimizers.SGD(2.0**-12)
    (first, second), optimizer = built("split", sgd)
    optimizer.apply([np.ones(64, "float32")] * 2)
    second.assign(np.full(64, 3.0))
    optimizer.assign_float32(first, np.full(64, 2.0, "float32"))
    np.testing.assert_array_equal(array(optimizer.read_float32(second)), 3.0)


@pytest.mark.costly
def test_an_assignment_of_one_constant_for_another_is_noticed():
    weight = keras.Variable(np.ones(4096), dtype="bfloat16", name="w")
    split = sixteen_bit.WAYS["split"]
    optimizer = split(keras.optimizers.SGD(2.0**-12))
    optimizer.build([weight])
    optimizer.apply([np.ones(4096, "float32")])
    weight.assign(np.full(4096, 4.0))
    np.testing.assert_array_equal(array(optimizer.read_float32(weight)), 4.0)


@pytest.mark.costly
@pytest.mark.parametrize("way", sixteen_bit.WAYS)
def test_set_weights_changes_nothing_if_one_array_does_not_fit(way):
    stored, optimizer = built(way, keras.optimizers.Adam())
    optimizer.apply([np.ones(64, "float32")] * 2)
    before = sixteen_bit.bits_of(optimizer.variables)
    weights = [ops.convert_to_numpy(v) * 0 for v in optimizer.variables]
    for wrong in (np.zeros(7), np.full(weights[-1].shape, "no")):
        with pytest.raises((ValueError, TypeError)):
            optimizer.set_weights([*weights[:-1], wrong])
        assert sixteen_bit.bits_of(optimizer.variables) == before


def test_loading_changes_nothing_if_one_array_does_not_fit():
    stored, optimizer = built("masters", keras.optimizers.Adam())
    store = {}
    optimizer.save_own_variables(store)
    optimizer.apply([np.ones(64, "float32")] * 2)
    before = sixteen_bit.bits_of(optimizer.variables)
    store[str(len(store) - 1)] = np.zeros(7)
    with pytest.raises(ValueError, match=r"shape \(7,\)"):
        optimizer.load_own_variables(store)
    assert sixteen_bit.bits_of(optimizer.variables) == before


def test_float32_weights_that_do_not_fit_change_nothing():
    model = keras.Sequential(
        [
            keras.Input((2,)),
            keras.layers.Dense(3, dtype="float32"),
            keras.layers.Dense(1, dtype="bfloat16"),
        ]
    )
    model.compile(master_weights.MasterWeightOptimizer("sgd"), loss="mse")
    before = sixteen_bit.bits_of(model.weights)
    weights = [ops.convert_to_numpy(array(v)) + 1 for v in model.weights]
    with pytest.raises(ValueError, match="shape"):
        float32_weights.load_float32(model, [*weights[:-1], np.zeros(7)])
    assert sixteen_bit.bits_of(model.weights) == before


@pytest.mark.parametrize(
    ("make", "setting"),
    [
        (
            lambda inner: bfloat16_optimizer.BFloat16Optimizer(inner, seed=5),
            "seed",
        ),
        (
            lambda inner: master_weights.MasterWeightOptimizer(
                inner, flat=True
            ),
            "flat",
        ),
    ],
)
def test_an_inner_setting_of_the_same_name_does_not_change(make, setting):
    inner = keras.optimizers.SGD()
    setattr(inner, setting, "theirs")
    optimizer = make(inner)
    assert getattr(inner, setting) == "theirs"
    assert optimizer.get_config()[setting] in (5, True)


@TENSORFLOW
@pytest.mark.parametrize("way", sixteen_bit.WAYS)
def test_repeated_rows_of_a_sparse_gradient_are_summed_in_float32(way):
    import tensorflow as tf

    table = keras.Variable(np.ones((4, 1)), dtype="bfloat16", name="t")
    optimizer = sixteen_bit.WAYS[way](keras.optimizers.SGD(2.0**-10))
    optimizer.build([table])
    rows = tf.ones((1024, 1), "bfloat16")
    optimizer.apply([tf.IndexedSlices(rows, tf.ones(1024, "int32"), (4, 1))])
    # A sum in bfloat16 would stop at 256.
    np.testing.assert_array_equal(array(table)[:, 0], [1.0, 0.0, 1.0, 1.0])


@pytest.mark.parametrize("way", sixteen_bit.WAYS)
def test_a_step_on_some_variables_does_not_change_others(way):
    stored, optimizer = built(way, keras.optimizers.SGD(0.5, momentum=0.5))
    if way == "flat":
        with pytest.raises(ValueError, match=r"none for \['w'\]"):
            optimizer.apply([np.ones(64, "float32")], [stored[1]])
        return
    optimizer.apply([np.ones(64, "float32")], [stored[1]])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.apply([None, np.ones(64, "float32")], stored)
    np.testing.assert_array_equal(array(stored[0]), 1.0)
    np.testing.assert_array_equal(array(stored[1]), -0.25)


@TENSORFLOW
@pytest.mark.parametrize("way", sixteen_bit.WAYS)
def test_a_checkpoint_can_be_restored_before_the_build(way, tmp_path):
    import tensorflow as tf

    stored, optimizer = built(way, keras.optimizers.Adam(0.01))
    grads = [np.full(64, 0.3, "float32"), np.full(64, -0.7, "float32")]
    optimizer.apply(grads)
    tf.train.Checkpoint(o=optimizer).write(str(tmp_path / "c"))
    fresh = sixteen_bit.WAYS[way](keras.optimizers.Adam(0.01))
    tf.train.Checkpoint(o=fresh).read(str(tmp_path / "c"))
    fresh.build(stored)
    assert sixteen_bit.bits_of(fresh.variables) == sixteen_bit.bits_of(
        optimizer.variables
    )


def test_settings_read_and_set_through_two_wrappers():
    adam = keras.optimizers.Adam(0.5, beta_1=0.75)
    optimizer = tfmix.LossScaleOptimizer(
        master_weights.MasterWeightOptimizer(adam)
    )
    assert optimizer.beta_1 == 0.75
    optimizer.beta_1, optimizer.weight_decay = 0.5, 0.25
    assert (adam.beta_1, adam.weight_decay) == (0.5, 0.25)
    optimizer.learning_rate = 0.125
    assert float(adam.learning_rate) == 0.125
    assert optimizer.inner_optimizer.weight_decay == 0.25
    with pytest.raises(AttributeError, match="no_such"):
        _ = optimizer.no_such_thing


@pytest.mark.costly
@helpers.requires_backend("tensorflow")
@pytest.mark.parametrize(
    "wrap",
    [
        tfmix.optimizers.BFloat16Optimizer,
        lambda inner: tfmix.optimizers.MasterWeightOptimizer(inner, split=True),
    ],
)
def test_a_model_becomes_a_saved_model_with_its_optimizer(wrap, tmp_path):
    import tensorflow as tf

    with tfmix.policy_scope("bfloat16"):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile(wrap("adam"), "mse")
    x = np.ones((4, 3), "float32")
    model.fit(x, x[:, :2], verbose=0)
    tf.saved_model.save(model, tmp_path)
    served = tf.saved_model.load(tmp_path).signatures["serving_default"]
    (found,) = served(tf.constant(x)).values()
    np.testing.assert_array_equal(
        tf.cast(found, "float32"), model.predict(x, verbose=0)
    )
