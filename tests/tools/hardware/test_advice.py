"""`advise` counts shapes, alignment, work and bytes as one would by hand."""

import dataclasses

import keras
import numpy as np
import pytest
from keras import layers

import tfmix
from tfmix.tools.hardware import advice as advising
from tfmix.tools.hardware import target as targets
from tfmix.tools.hardware import training_memory

advise = advising.advise


def sequential(*parts, shape=(16,)):
    return keras.Sequential([keras.Input(shape), *parts])


PAIR = [layers.LSTMCell(4), layers.GRUCell(5)]
LSTM, GRU = [(224, 3, 16), (32, 4, 16)], [(224, 4, 15), (32, 5, 15)]


@pytest.mark.parametrize(
    ("layer", "shapes", "expected"),
    [
        (layers.Dense(10), [(64,)], [(32, 64, 10)]),
        (layers.Dense(8), [(5, 64)], [(160, 64, 8)]),
        (layers.Conv2D(16, 3), [(8, 8, 4)], [(32 * 36, 36, 16)]),
        (layers.Conv2D(16, 3, groups=2), [(8, 8, 4)], [(32 * 36, 18, 8)]),
        (layers.Conv2DTranspose(6, 2), [(8, 8, 4)], [(32 * 64, 4, 24)]),
        (layers.EinsumDense("abc,cd->abd", (5, 8)), [(5, 64)], [(160, 64, 8)]),
        (layers.LSTM(12), [(5, 7)], [(160, 7, 48), (32, 12, 48)]),
        (layers.RNN(layers.LSTMCell(4)), [(7, 3)], LSTM),
        (layers.RNN(PAIR), [(7, 3)], [*LSTM, *GRU]),
        (layers.MultiHeadAttention(2, 8), [(6, 16)], [(6, 8, 6), (6, 6, 8)]),
        (
            layers.MultiHeadAttention(2, 8, attention_axes=2),
            [(5, 12, 16)],
            [(12, 8, 12), (12, 12, 8)],
        ),
    ],
)
def test_products_have_the_shapes_of_the_matrices(layer, shapes, expected):
    inputs = [keras.Input(shape) for shape in shapes]
    given = [inputs] if len(shapes) > 1 else inputs
    if isinstance(layer, layers.MultiHeadAttention):
        given = inputs * 2
    rows = advise(keras.Model(inputs, layer(*given)), 32).rows
    (found,) = [row for row in rows if row.layer.endswith(layer.name)]
    assert list(found.shapes) == expected


@pytest.mark.parametrize(
    ("units", "aligned", "tpu", "padding"),
    [
        (128, True, True, ""),
        (24, True, False, ""),
        (10, False, False, "n 10 -> 16"),
    ],
)
def test_alignment_needs_multiples(units, aligned, tpu, padding):
    model = sequential(layers.Dense(units), shape=(128,))
    (row,) = advise(model, 32).rows
    assert (row.aligned, row.aligned_tpu) == (aligned, tpu)
    assert row.padding == padding


def test_the_share_in_16_bit_is_of_the_work():
    model = sequential(
        layers.Dense(48, dtype="mixed_float16"),
        layers.Dense(16, dtype="float32"),
    )
    # There are 16 x 48 products in one layer, and 48 x 16 in the other.
    assert advise(model, 8).share_16bit == 0.5


def test_memory_is_the_size_of_variables_and_outputs():
    model = sequential(layers.Dense(8))
    model.compile(keras.optimizers.SGD(momentum=0.9), "mse")
    model.optimizer.build(model.trainable_variables)
    memory = advise(model, 32).memory
    weights = held_by(model.variables)
    wide, mixed, narrow = (
        memory[way] for way in ("float32", "mixed_float16", "float16")
    )
    assert wide.weights == mixed.weights == weights == 4 * (16 * 8 + 8)
    assert mixed.gradients == weights == narrow.masters
    assert narrow.weights == narrow.gradients == weights / 2
    assert mixed.masters == 0
    assert narrow.slots == pytest.approx(weights, abs=64)
    assert wide.activations == 2 * mixed.activations == 4 * 32 * 8


@pytest.mark.parametrize(
    ("layer", "of_step"),
    [
        # Gates and states, of which the last output is a part.
        (layers.LSTM(12), 4 * 12 + 2 * 12),
        (layers.LSTM(12, return_sequences=True), 4 * 12 + 2 * 12),
        (layers.GRU(12), 3 * 12 + 12),
        (layers.SimpleRNN(12), 12 + 12),
        (layers.Bidirectional(layers.LSTM(12)), 2 * (4 * 12 + 2 * 12)),
        (layers.RNN(PAIR), 4 * 4 + 2 * 4 + 3 * 5 + 5),
    ],
)
def test_recurrent_layers_keep_gates_and_states_of_all_steps(layer, of_step):
    memory = advise(sequential(layer, shape=(40, 3)), 32).memory
    kept = memory["float32"].activations / 4
    assert kept == 32 * 40 * of_step
    assert memory["mixed_float16"].activations == 2 * kept


def tokens():
    """A model with two inputs of any length, like those of KerasHub."""
    names = ("ids", "mask")
    inputs = {
        name: keras.Input((None,), name=name, dtype="int32") for name in names
    }
    hidden = layers.Embedding(50, 16)(inputs["ids"])
    hidden = hidden * keras.ops.cast(inputs["mask"], hidden.dtype)[..., None]
    return keras.Model(inputs, layers.Dense(8, name="head")(hidden))


class Unbuilt(keras.Model):
    def __init__(self):
        super().__init__()
        self.head = layers.Dense(8, name="head")

    def call(self, inputs):
        return self.head(inputs)


def test_a_subclassed_model_is_run_on_the_shapes_it_was_built_with():
    model = Unbuilt()
    model(np.ones((2, 16), "float32"))
    (row,) = advise(model, 64).rows
    assert row.shapes == ((64, 16, 8),)


def test_a_free_length_is_taken_from_a_shape():
    (row,) = advise(tokens(), 32, input_shape=(6,)).rows
    assert row.shapes == ((32 * 6, 16, 8),)


def test_the_ten_costliest_layers_are_printed():
    parts = [layers.Dense(10, name=f"layer_{n}") for n in range(12)]
    advice = advise(sequential(*parts), 32)
    assert len(advice.rows) == 12
    assert str(advice).count("layer_") == 10
    assert "n 10 -> 16" in str(advice)
    assert "and 2 cheaper layers" in str(advice)
    assert "No product is in 16 bit" in str(advice)


FREE = sequential(layers.Dense(4), shape=(None, 3))


@pytest.mark.parametrize(
    ("model", "rows", "given", "message"),
    [
        ("resnet", 32, {}, "model='resnet'"),
        (sequential(layers.Dense(4)), 0, {}, "batch_size=0"),
        (FREE, 32, {}, r"input_shape=\(128, 3\)"),
        (FREE, 32, {"input_shape": (5,)}, r"input_shape=\(5,\)"),
        (FREE, 32, {"input_shape": (None, 3)}, r"input_shape=\(128, 3\)"),
        (Unbuilt(), 32, {}, r"Call it once on a batch, or pass `input_sh"),
        (FREE, 32, {"target": "v5"}, "Did you mean 'v5p'"),
    ],
)
def test_wrong_arguments_are_refused(model, rows, given, message):
    with pytest.raises((TypeError, ValueError), match=message) as caught:
        advise(model, rows, **given)
    # `advise` has no `devices`, which only `compile_for` has.
    assert "devices" not in str(caught.value)


ADAM = keras.optimizers.Adam
MASTERS = tfmix.optimizers.MasterWeightOptimizer
ROUNDED = tfmix.optimizers.BFloat16Optimizer
LOW = tfmix.optimizers.LowMemoryOptimizer
# Ways to train, with functions that create the optimizer.
WAYS = {
    "float32": ADAM,
    "mixed_float16": ADAM,
    "mixed_bfloat16, 8-bit state": lambda: LOW(ADAM()),
    "float16": lambda: MASTERS(ADAM()),
    "float16, 8-bit state": lambda: MASTERS(LOW(ADAM())),
    "bfloat16, no masters": lambda: ROUNDED(ADAM()),
    "bfloat16, no masters, 8-bit state": lambda: ROUNDED(LOW(ADAM())),
}


def wide(way):
    keras.config.set_dtype_policy(way.partition(",")[0])
    hidden = [layers.Dense(256, "relu") for _ in range(3)]
    model = sequential(*hidden, layers.Dense(16), shape=(64,))
    optimizer = WAYS[way]()
    model.compile(tfmix.LossScaleOptimizer(optimizer), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def held_by(variables):
    return sum(np.array(variable).nbytes for variable in variables)


@pytest.mark.costly
@pytest.mark.parametrize("way", WAYS)
def test_bytes_of_weights_and_state_match_the_variables(way):
    model = wide(way)
    memory = advise(model, 512).memory[way]
    assert memory.weights == held_by(model.variables)
    # The loss scale, counters and learning rate are not in these numbers.
    held = held_by(model.optimizer.variables)
    assert memory.masters + memory.slots == pytest.approx(held, rel=0.01)
    # The estimate must be the same before the model is trained in that way.
    before = advise(wide("float32"), 512).memory[way]
    assert before.slots == pytest.approx(memory.slots, rel=0.01)
    assert before.masters == memory.masters


EIGHT = "mixed_bfloat16, 8-bit state"
LEAST = "bfloat16, no masters, 8-bit state"


@pytest.mark.parametrize(
    ("name", "way", "expected", "more"),
    [
        # "auto" is bfloat16 there, although float16 needs no more memory.
        ("h200", "mixed_float16", "mixed_bfloat16", ""),
        ("v5e", "mixed_bfloat16", "mixed_bfloat16", ""),
        ("t4", "mixed_bfloat16", "mixed_float16", ""),
        ("v5e", EIGHT, EIGHT, "LowMemoryOptimizer(optimizer)"),
        (
            "v5e",
            LEAST,
            LEAST,
            "BFloat16Optimizer(tfmix.optimizers.LowMemoryOptimizer(optimizer))",
        ),
    ],
)
def test_the_first_way_in_16_bit_that_fits_is_named(name, way, expected, more):
    found = advise(wide("float32"), 32).memory
    target = targets.find(name)

    def said(memory):
        fitting = dataclasses.replace(target, memory=memory)
        return training_memory.first_that_fits(found, fitting)

    how = f". Compile with tfmix.optimizers.{more}" if more else ""
    assert said(found[way].total).endswith(f"first that fits: {expected}{how}")
    all_fit = f"float32 fits; faster is {target.auto()}"
    assert all_fit in said(found["float32"].total)
    assert "None of these" in said(1)


def test_the_advice_describes_float8_layers():
    sizes = {"first": 4096, "second": 4096, "narrow": 96, "last": 10}
    with tfmix.policy_scope("mixed_float8"):
        model = sequential(*(layers.Dense(n, name=k) for k, n in sizes.items()))
    found = advise(model, 4096)
    rows = {row.layer.split("/")[-1]: row.float8 for row in found.rows}
    assert rows["second"] == "yes"
    assert rows["narrow"] == "4096 x 96 is too small to gain"
    text = str(found)
    assert "1 layers multiply in float8." in text
    assert "narrow: 4096 x 96 is too small to gain." in text
    # The first call chooses the same layers.
    model(np.ones((1, 16), "float32"))
    assert advise(model, 4096) == found
    # Another policy does not mention float8.
    other = advise(sequential(layers.Dense(1024), shape=(1024,)), 32)
    assert (other.float8, other.rows[0].float8) == ((), "")
