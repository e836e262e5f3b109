"""Behaviour that all optimizers of 16-bit variables, or 8-bit state, share."""

import json
import warnings

import keras
import numpy as np
import pytest
from keras import ops

import tfmix
from tests import helpers, steps
from tests.optimizers import sixteen_bit
from tests.optimizers.sixteen_bit import bits_of
from tfmix.optimizers import bfloat16_optimizer, low_memory, master_weights

TENSORFLOW = helpers.requires_backend("tensorflow")
WAYS = sixteen_bit.WAYS
EACH_WAY = pytest.mark.parametrize("way", WAYS)
Masters = master_weights.MasterWeightOptimizer


def ones(names="wb", size=64):
    return [
        keras.Variable(np.ones(size), dtype="bfloat16", name=name)
        for name in names
    ]


def built(way, inner):
    """Returns two variables of ones, and an optimizer built on them."""
    stored, optimizer = ones(), WAYS[way](inner)
    optimizer.build(stored)
    return stored, optimizer


def array(value):
    return ops.convert_to_numpy(ops.cast(value, "float32"))


UP = np.ones(64, "float32")


@pytest.mark.parametrize("by_name", [False, True])
@EACH_WAY
def test_variables_can_be_excluded_from_decay(way, by_name):
    kernel, bias = stored = ones(["kernel", "bias"])
    optimizer = WAYS[way](keras.optimizers.SGD(0.5, weight_decay=0.5))
    how = {"var_names": ["bias"]} if by_name else {"var_list": [bias]}
    optimizer.exclude_from_weight_decay(**how)
    optimizer.build(stored)
    optimizer.apply([0 * UP, 0 * UP])
    assert (float(kernel[0]), float(bias[0])) == (0.75, 1.0)


@pytest.mark.costly
@EACH_WAY
def test_all_state_is_set_or_none(way):
    _, optimizer = built(way, keras.optimizers.Adam())
    _, other = built(way, keras.optimizers.Adam())
    optimizer.apply([UP, UP])
    weights, store = helpers.snapshot(optimizer.variables), {}
    other.set_weights(weights)
    before = bits_of(other.variables)
    assert before == bits_of(optimizer.variables)
    zeros = [weight * 0 for weight in weights[:-1]]
    for wrong in (np.zeros(7), np.full(weights[-1].shape, "no")):
        with pytest.raises((ValueError, TypeError)):
            other.set_weights([*zeros, wrong])
    with pytest.raises(ValueError, match="3 arrays"):
        other.set_weights(zeros[:3])
    built(way, keras.optimizers.Adam())[1].save_own_variables(store)
    store[str(len(store) - 1)] = np.zeros(7)
    with pytest.raises(ValueError, match=r"shape \(7,\)"):
        other.load_own_variables(store)
    assert bits_of(other.variables) == before


@pytest.mark.parametrize(
    "optimizer",
    [
        Masters(keras.optimizers.Adam(0.25, beta_1=0.5), name="my"),
        bfloat16_optimizer.BFloat16Optimizer("sgd", seed=11, name="my"),
        Masters(low_memory.LowMemoryOptimizer("lion")),
        low_memory.LowMemoryOptimizer("adam", seed=np.int64(7), name="my"),
    ],
)
def test_the_config_holds_every_setting(optimizer):
    config = keras.saving.serialize_keras_object(optimizer)
    again = keras.saving.deserialize_keras_object(
        json.loads(json.dumps(config))
    )
    assert type(again) is type(optimizer)
    assert again.get_config() == optimizer.get_config()


@TENSORFLOW
@EACH_WAY
def test_repeated_rows_of_a_sparse_gradient_are_summed_in_float32(way):
    import tensorflow as tf

    table = keras.Variable(np.ones((4, 1)), dtype="bfloat16", name="t")
    optimizer = WAYS[way](keras.optimizers.SGD(2.0**-10))
    optimizer.build([table])
    rows = tf.ones((1024, 1), "bfloat16")
    optimizer.apply([tf.IndexedSlices(rows, tf.ones(1024, "int32"), (4, 1))])
    # A sum in bfloat16 would stop at 256.
    np.testing.assert_array_equal(array(table)[:, 0], [1.0, 0.0, 1.0, 1.0])


@EACH_WAY
def test_a_step_on_some_variables_does_not_change_others(way):
    stored, optimizer = built(way, keras.optimizers.SGD(0.5, momentum=0.5))
    optimizer.apply([UP], [stored[1]])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.apply([None, UP], stored)
    np.testing.assert_array_equal(array(stored[0]), 1.0)
    np.testing.assert_array_equal(array(stored[1]), -0.25)


def test_slots_are_float32_and_float16_variables_are_refused():
    inner = keras.optimizers.Adam()
    WAYS["stochastic"](inner).build(sixteen_bit.variables("bfloat16"))
    assert {str(v.dtype) for v in inner.variables if v.ndim} == {"float32"}
    stored = sixteen_bit.variables("float16")
    with pytest.raises(ValueError, match="'v0' of dtype 'float16'"):
        WAYS["stochastic"](keras.optimizers.SGD()).build(stored)


EIGHT_BIT = ("float32", "mixed_float16", "mixed_bfloat16")
SAVED = [(way, "bfloat16") for way in WAYS]
SAVED += [("low memory", policy) for policy in EIGHT_BIT]


@pytest.mark.parametrize(
    ("way", "policy"),
    helpers.quick_are(
        {("masters", "bfloat16"), ("low memory", "float32")}, SAVED
    ),
)
def test_a_saved_run_continues_bit_for_bit(way, policy, tmp_path):
    optimizer = sixteen_bit.STATES[way](keras.optimizers.AdamW(0.01))
    if way in WAYS:
        optimizer = tfmix.LossScaleOptimizer(optimizer, 4.0)
    model = sixteen_bit.model_of(optimizer, policy, steps.MODES[1])
    sixteen_bit.fit(model, 1)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert sixteen_bit.fit(loaded, 2) == sixteen_bit.fit(model, 2)
    ours, theirs = (m.weights + m.optimizer.variables for m in (loaded, model))
    assert bits_of(ours) == bits_of(theirs)


@pytest.mark.costly
@TENSORFLOW
@pytest.mark.parametrize("is_built", [True, False])
@pytest.mark.parametrize("is_scaled", [True, False])
@pytest.mark.parametrize("way", sixteen_bit.STATES)
def test_a_run_continues_from_a_checkpoint_bit_for_bit(
    way, is_scaled, is_built, tmp_path
):
    import tensorflow as tf

    def optimizer_of_way():
        optimizer = sixteen_bit.STATES[way](keras.optimizers.Adam(0.1))
        if not is_scaled:
            return optimizer
        none = tfmix.NoLossScale()
        return tfmix.LossScaleOptimizer(optimizer, loss_scale=none)

    dtype = "bfloat16" if way in WAYS else "float32"
    gradients = sixteen_bit.gradients(4)
    (stored, optimizer), (other, restored) = states = [
        (sixteen_bit.variables(dtype), optimizer_of_way()) for _ in range(2)
    ]
    sixteen_bit.run(optimizer, stored, gradients[:2])
    tf.train.Checkpoint(v=stored, o=optimizer).write(str(tmp_path / "c"))
    if is_built:
        restored.build(other)
    checkpoint = tf.train.Checkpoint(v=other, o=restored)
    status = checkpoint.read(str(tmp_path / "c"))
    if is_built:
        status.assert_consumed()
    for variables, each in states:
        sixteen_bit.run(each, variables, gradients[2:])
    ours, theirs = (bits_of(v + o.variables) for v, o in states)
    assert ours == theirs


@TENSORFLOW
def test_gradients_travel_in_the_dtype_of_the_variables(monkeypatch):
    import tensorflow as tf

    strategy = helpers.mirrored_strategy()
    seen = []
    original = tf.distribute.ReplicaContext.all_reduce

    def spied(self, op, value, options=None):
        if self.num_replicas_in_sync > 1:
            seen.extend(each.dtype.name for each in tf.nest.flatten(value))
        return original(self, op, value, options)

    monkeypatch.setattr(tf.distribute.ReplicaContext, "all_reduce", spied)
    with strategy.scope():
        (weight,) = ones("w", 2)
        optimizer = Masters(keras.optimizers.SGD(0.25))
        optimizer.build([weight])

    @tf.function
    def step():
        strategy.run(lambda: optimizer.apply([tf.ones(2, "bfloat16")]))

    step()
    assert set(seen) == {"bfloat16"}
    assert array(optimizer.read_float32(weight)).tolist() == [0.5, 0.5]
