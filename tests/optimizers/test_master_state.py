"""The 16-bit optimizers check arguments, save, load, export and mirror."""

import keras
import numpy as np
import pytest
from keras import ops

import tfmix
from tests import helpers, sixteen_bit
from tfmix.optimizers import bfloat16_optimizer, float32_weights, master_weights

TENSORFLOW = helpers.requires_backend("tensorflow")


def refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("inner", "error", "message"),
    [
        (
            lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
            ValueError,
            r"LossScaleOptimizer\(MasterWeightOptimizer",
        ),
        (
            lambda: master_weights.MasterWeightOptimizer("sgd"),
            ValueError,
            "cannot wrap MasterWeightOptimizer",
        ),
        (
            lambda: bfloat16_optimizer.BFloat16Optimizer("sgd"),
            ValueError,
            "cannot wrap BFloat16Optimizer",
        ),
        (lambda: 3, TypeError, "inner_optimizer=3 of type int"),
        (lambda: "no_such", ValueError, "no_such"),
    ],
)
def test_an_optimizer_that_cannot_be_wrapped_is_refused(inner, error, message):
    optimizer = inner()
    refused(
        lambda: master_weights.MasterWeightOptimizer(optimizer), error, message
    )


def built_in_a_map():
    used = keras.optimizers.SGD()
    used.build([keras.Variable([1.0])])
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        return used
    choice = keras.optimizers.OptimizerMap(used)
    return keras.optimizers.MultiOptimizer(choice)


def test_a_built_optimizer_is_refused():
    stored = sixteen_bit.variables("bfloat16")
    make = master_weights.MasterWeightOptimizer
    inner = keras.optimizers.SGD()
    late = make(inner, split=True)
    inner.build(stored)
    message = "(?i)'sgd', which is built already"
    refused(lambda: late.build(stored), ValueError, "is built already")
    refused(lambda: make(inner), ValueError, message)
    refused(lambda: make(built_in_a_map()), ValueError, "is built already")


def test_contradicting_arguments_are_refused():
    make = master_weights.MasterWeightOptimizer
    refused(lambda: make("sgd", flat=1), TypeError, "flat=1")
    both = {"flat": True, "split": True}
    refused(lambda: make("sgd", **both), ValueError, "flat=True, split=True")


class Mine(keras.optimizers.SGD):
    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, gradient)


class Declared(Mine):
    elementwise = True


def constrained():
    stored = sixteen_bit.variables("bfloat16")
    stored[1].constraint = keras.constraints.NonNeg()
    return stored


@pytest.mark.parametrize(
    ("inner", "reason"),
    [
        (keras.optimizers.Lamb, "that variable's norm"),
        (keras.optimizers.Muon, "orthogonalises each weight matrix"),
        (keras.optimizers.Adafactor, "row and column statistics"),
        (lambda: keras.optimizers.SGD(clipnorm=1.0), "clipnorm=1.0"),
        (Mine, "of type Mine"),
    ],
)
def test_flat_names_why_an_optimizer_does_not_fit(inner, reason):
    make = master_weights.MasterWeightOptimizer
    stored = sixteen_bit.variables("bfloat16")
    optimizer = make(inner(), flat=True)
    refused(lambda: optimizer.build(stored), ValueError, reason)
    sgd = make(keras.optimizers.SGD(), flat=True)
    refused(lambda: sgd.build(constrained()), ValueError, "'v1' with constr")
    declared = make(Declared(), flat=True)
    declared.build(stored)
    declared.clipnorm = 1.0
    grads = sixteen_bit.gradients(1)[0]
    refused(lambda: declared.apply(grads), ValueError, "clipnorm=1.0")


def test_flat_needs_every_gradient_and_names_missing_ones():
    stored = sixteen_bit.variables("bfloat16")
    optimizer = master_weights.MasterWeightOptimizer("sgd", flat=True)
    optimizer.build(stored)
    grads = [None, *sixteen_bit.gradients(1)[0][1:]]
    refused(lambda: optimizer.apply(grads, stored), ValueError, r"\['v0'\]")


def test_unknown_variables_and_wrong_counts_are_refused():
    stored = sixteen_bit.variables("bfloat16")
    optimizer = master_weights.MasterWeightOptimizer("sgd")
    optimizer.build(stored)
    stranger = keras.Variable([1.0], dtype="bfloat16")
    one = [np.ones(1, "float32")]
    refused(lambda: optimizer.apply(one, [stranger]), ValueError, "nknown")
    counts = f"1 gradients for {len(stored)}"
    refused(lambda: optimizer.apply(one), ValueError, counts)
    fresh = master_weights.MasterWeightOptimizer("sgd")
    refused(lambda: fresh.apply(one), ValueError, "trainable_variables=None")
    refused(lambda: optimizer.read_float32(stranger), ValueError, "nknown")


def small_model(policy="bfloat16"):
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, activation="tanh", dtype=policy),
            keras.layers.BatchNormalization(dtype=policy),
            keras.layers.Dense(1, dtype=policy),
        ]
    )
    return model


def data():
    random = np.random.default_rng(0)
    x = random.normal(size=(64, 8)).astype("float32")
    return x, x @ random.normal(size=(8, 1)).astype("float32")


def compiled(way, policy="bfloat16", **settings):
    model = small_model(policy)
    inner = keras.optimizers.AdamW(0.01, **settings)
    optimizer = tfmix.LossScaleOptimizer(sixteen_bit.WAYS[way](inner), 4.0)
    model.compile(optimizer, loss="mse", jit_compile=False)
    return model


def fit(model, epochs=1):
    x, y = data()
    model.fit(x, y, batch_size=32, epochs=epochs, verbose=0, shuffle=False)


@pytest.mark.costly
@pytest.mark.parametrize(
    "way",
    [
        "masters",
        "stochastic",
        pytest.param("flat", marks=pytest.mark.slow),
        pytest.param("split", marks=pytest.mark.slow),
    ],
)
def test_a_saved_run_continues_bit_for_bit(way, tmp_path):
    model = compiled(way)
    fit(model)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for each in (model, loaded):
        fit(each, epochs=2)
    state = [m.weights + m.optimizer.variables for m in (model, loaded)]
    assert sixteen_bit.bits_of(state[0]) == sixteen_bit.bits_of(state[1])


@pytest.mark.costly
@TENSORFLOW
@pytest.mark.parametrize("way", sixteen_bit.WAYS)
def test_a_run_continues_from_a_tensorflow_checkpoint_bit_for_bit(
    way, tmp_path
):
    import tensorflow as tf

    states, steps = [], sixteen_bit.gradients(4)
    for _ in range(2):
        stored = sixteen_bit.variables("bfloat16")
        optimizer = sixteen_bit.WAYS[way](keras.optimizers.Adam(0.1))
        optimizer.build(stored)
        states.append((stored, optimizer))
    (stored, optimizer), (other, restored) = states
    sixteen_bit.run(optimizer, stored, steps[:2])
    tf.train.Checkpoint(v=stored, o=optimizer).write(str(tmp_path / "c"))
    checkpoint = tf.train.Checkpoint(v=other, o=restored)
    checkpoint.read(str(tmp_path / "c")).assert_consumed()
    for each, variables in ((optimizer, stored), (restored, other)):
        sixteen_bit.run(each, variables, steps[2:])
    final = [sixteen_bit.bits_of(v + o.variables) for v, o in states]
    assert final[0] == final[1]


@pytest.mark.parametrize(
    "make",
    [
        lambda: master_weights.MasterWeightOptimizer(
            keras.optimizers.Adam(0.25, beta_1=0.5), flat=True, name="mine"
        ),
        lambda: master_weights.MasterWeightOptimizer(
            "sgd", split=True, name="mine"
        ),
        lambda: bfloat16_optimizer.BFloat16Optimizer(
            "sgd", seed=11, name="mine"
        ),
    ],
)
def test_the_config_holds_every_setting(make):
    optimizer = make()
    config = keras.saving.serialize_keras_object(optimizer)
    again = keras.saving.deserialize_keras_object(config)
    assert type(again) is type(optimizer)
    assert again.get_config() == optimizer.get_config()


def test_set_weights_sets_all_state_and_refuses_a_part():
    stored = sixteen_bit.variables("bfloat16")
    first, second = (
        master_weights.MasterWeightOptimizer("adam") for _ in range(2)
    )
    first.build(stored)
    second.build(stored)
    sixteen_bit.run(first, stored, sixteen_bit.gradients(1))
    weights = [ops.convert_to_numpy(v) for v in first.variables]
    refused(lambda: second.set_weights(weights[:3]), ValueError, "3 arrays")
    second.set_weights(weights)
    left, right = first.variables, second.variables
    assert sixteen_bit.bits_of(left) == sixteen_bit.bits_of(right)


@pytest.mark.costly
@pytest.mark.parametrize("way", sixteen_bit.EXACT_WAYS)
def test_float32_weights_go_in_and_come_out_without_loss(way, tmp_path):
    source = small_model("float32")
    random = np.random.default_rng(3)
    weights = [
        np.abs(random.normal(size=v.shape)).astype("float32")
        for v in source.weights
    ]
    source.set_weights(weights)
    source.save_weights(tmp_path / "float32.weights.h5")
    model = compiled(way)
    float32_weights.load_float32(model, tmp_path / "float32.weights.h5")
    trainable = [v.trainable for v in model.weights]
    exported = float32_weights.export_float32(
        model, tmp_path / "out.weights.h5"
    )
    for kept, got, wanted in zip(trainable, exported, weights, strict=True):
        if kept:
            np.testing.assert_array_equal(got, wanted)
        assert got.dtype == np.float32
    source.load_weights(tmp_path / "out.weights.h5")
    for got, wanted in zip(source.get_weights(), exported, strict=True):
        np.testing.assert_array_equal(got, wanted)
    dtypes = {str(v.dtype) for v in model.trainable_variables}
    assert dtypes == {"bfloat16"}


def test_load_float32_accepts_a_list_and_names_what_it_needs():
    model = compiled("masters")
    weights = [v + 0.001 for v in float32_weights.export_float32(model)]
    float32_weights.load_float32(model, weights)
    got = float32_weights.export_float32(model)
    np.testing.assert_array_equal(got[0], weights[0])
    bare = small_model()
    refused(
        lambda: float32_weights.load_float32(bare, weights),
        ValueError,
        "Compile",
    )
    refused(lambda: float32_weights.export_float32(3), TypeError, "model=3")
    unbuilt = keras.Sequential([keras.layers.Dense(1)])
    refused(
        lambda: float32_weights.export_float32(unbuilt),
        ValueError,
        "no weights",
    )


def test_a_quantized_model_has_no_float32_weights_to_export(tmp_path):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
    model.layers[0].quantize("int8")
    path = tmp_path / "out.weights.h5"
    refused(
        lambda: float32_weights.export_float32(model, path),
        ValueError,
        "quantized layers.*'int8'.*before `quantize`",
    )
    assert not path.exists()


@pytest.mark.costly
@TENSORFLOW
@pytest.mark.parametrize(
    ("way", "scaled"),
    [
        ("flat", False),
        ("stochastic", True),
        pytest.param("masters", True, marks=pytest.mark.slow),
        pytest.param("split", False, marks=pytest.mark.slow),
    ],
)
def test_replicas_stay_alike_and_learn(way, scaled):
    strategy = helpers.mirrored_strategy()
    settings = {"use_ema": True, "ema_overwrite_frequency": 3}
    with strategy.scope():
        model = small_model()
        inner = keras.optimizers.SGD(
            0.125, gradient_accumulation_steps=2, **settings
        )
        optimizer = sixteen_bit.WAYS[way](inner)
        if scaled:
            optimizer = tfmix.LossScaleOptimizer(optimizer, 4.0)
        model.compile(optimizer, loss="mse", jit_compile=False)
    x, y = data()
    before = model.evaluate(x, y, verbose=0)
    fit(model, epochs=4)
    assert model.evaluate(x, y, verbose=0) < 0.5 * before
    for variable in model.trainable_variables:
        copies = strategy.experimental_local_results(variable.value)
        first, second = (sixteen_bit.bits_of([copy]) for copy in copies)
        assert first == second


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
        weight = keras.Variable(np.ones(2), dtype="bfloat16", name="w")
        optimizer = master_weights.MasterWeightOptimizer(
            keras.optimizers.SGD(0.25)
        )
        optimizer.build([weight])

    @tf.function
    def step():
        strategy.run(lambda: optimizer.apply([tf.ones(2, "bfloat16")]))

    step()
    assert set(seen) == {"bfloat16"}
    np.testing.assert_array_equal(
        ops.convert_to_numpy(optimizer.read_float32(weight)), [0.5, 0.5]
    )


@pytest.mark.costly
@TENSORFLOW
@pytest.mark.parametrize("way", ["masters", "flat", "stochastic"])
def test_a_nan_on_one_replica_is_skipped_on_all(way):
    import tensorflow as tf

    strategy = helpers.mirrored_strategy()
    with strategy.scope():
        stored = [keras.Variable(np.ones(4), dtype="bfloat16", name="w")]
        inner = sixteen_bit.WAYS[way](keras.optimizers.Adam(0.1))
        optimizer = tfmix.LossScaleOptimizer(inner, 4.0)
        optimizer.build(stored)
    helpers.takes_scaled_gradients(optimizer)

    def on_replica(bad):
        context = tf.distribute.get_replica_context()
        here = tf.equal(context.replica_id_in_sync_group, 1)
        nan = tf.where(tf.logical_and(here, bad), np.nan, 1.0)
        optimizer.apply([tf.fill([4], tf.cast(nan, "bfloat16"))], stored)

    step = tf.function(lambda bad: strategy.run(on_replica, args=(bad,)))

    def copies():
        values = [v.value for v in stored + inner.variables]
        return [
            sixteen_bit.bits_of([copy])
            for value in values
            for copy in strategy.experimental_local_results(value)
        ]

    step(tf.constant(False))
    before = copies()
    step(tf.constant(True))
    assert copies() == before
    assert optimizer.skipped_steps == 1
