"""The compiled products of `mixed_float8`."""

import collections
import re

import keras
import pytest
from keras import layers

import tfmix
from tests.tools.hardware import programs
from tfmix.tools.hardware import hlo_text

WIDTH, ROWS, LENGTH, WORDS = 1024, 32, 256, 1008
EVERY = tfmix.Policy("mixed_float8", float8_layers=["Dense", "EinsumDense"])
GPUS = pytest.mark.parametrize("name", ["h100", "h200", "b200"])


@pytest.fixture
def compiled(monkeypatch):
    """Returns a function that compiles for a target, with cuBLAS's products."""
    found = programs.recorded(monkeypatch)

    def compile_for(model, rows, name, **how):
        programs.skip_without(name)
        if keras.backend.backend() != "jax":
            pytest.skip("`compile_for` compiles what JAX runs")
        model.compile(**how)
        step = tfmix.hardware.compile_for(model, rows, target=name)
        kernels = {row.kernel for row in step.rows if row.dtype == "float8"}
        assert kernels <= {"cuBLAS"}
        return step, found[-1][0]

    return compile_for


def transformer(blocks):
    inputs = keras.Input((LENGTH,), dtype="int32")
    h = layers.Embedding(WORDS, WIDTH)(inputs)
    for _ in range(blocks):
        attended = layers.MultiHeadAttention(16, 64)(h, h)
        h = layers.LayerNormalization()(h + attended)
        wide = layers.Dense(4 * WIDTH, activation="gelu")(h)
        h = layers.LayerNormalization()(h + layers.Dense(WIDTH)(wide))
    return keras.Model(inputs, layers.Dense(WORDS)(h))


def transposed(text, shape):
    """Returns the kernels that only transpose a rounded matrix of a shape."""
    computations, entry = hlo_text.parse(text)
    run = computations[entry]
    narrow = {name for name, x in run.items() if x.result.startswith("f8")}
    return [
        name
        for name in narrow
        if run[name].operation == "fusion"
        and run[name].result.startswith(f"f8e4m3fn{[*shape]}".replace(" ", ""))
        and {*run[name].operands} <= narrow
    ]


def returned(text):
    """Returns the output dtypes of float8 products."""
    # A long sum is a batch of parts, which are added in float32.
    call = r"%cublas-gemm\S* = \(?(\w+)\["
    call += r"[^\n]*custom_call_target=\"__cublas\$lt\$matmul\$f8"
    found = set(re.findall(call, text))
    for computation in text.split("\n}\n"):
        types = dict(re.findall(r"(%[\w.-]+) = \(?(\w+)\[", computation))
        # A long sum may be split into parts, which are added in float32.
        product = r"(%\S+) = .* dot\((%[\w.-]+), %\S+\), lhs_contracting"
        for name, factor in re.findall(product, computation):
            if types[factor].startswith("f8"):
                found.add(types[name])
    return found


@pytest.mark.costly
@GPUS
def test_90_percent_of_a_transformers_operations_are_in_float8(compiled, name):
    with tfmix.policy_scope(EVERY):
        model = transformer(2)
    step, text = compiled(model, ROWS, name, **TRAINED)
    work = collections.Counter()
    for row in step.rows:
        work[row.dtype] += row.flops
    assert work["float8"] >= 0.9 * work.total()
    assert step.conditionals == 0
    # Scaling and rounding do not read or write float32.
    assert returned(text) == {"bf16"}
    # A chosen layer has one forward product and two backward.
    tokens = ROWS * LENGTH
    wide = [
        row
        for row in step.rows
        if sorted(row.shape) == sorted((WIDTH, 4 * WIDTH, tokens))
    ]
    assert [row.dtype for row in wide] == ["float8"] * 12


TRAINED = {
    "optimizer": "adam",
    "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
}


@GPUS
def test_two_layers_take_few_more_kernels_than_in_bfloat16(compiled, name):
    kernels = {}
    every = tfmix.Policy("mixed_float8", float8_layers=["Dense"])
    for policy in ("mixed_bfloat16", every):
        with tfmix.policy_scope(policy):
            dense = [layers.Dense(1024, "relu"), layers.Dense(1024)]
            model = keras.Sequential([keras.Input((1024,)), *dense])
        step, text = compiled(model, 4096, name, optimizer="sgd", loss="mse")
        kernels[str(policy)] = step.kernels
    # A kernel that rounds a weight writes it for both of its products.
    assert not transposed(text, (1024, 1024))
    before, after = kernels.values()
    # Each of six tensors has a kernel for its rows' largest numbers, one for
    # the scales and one for the cast. bfloat16 also casts the weights.
    assert after <= before + 14
