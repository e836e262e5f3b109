"""The products of `mixed_float8`, as the compiler makes them."""

import collections

import keras
import pytest
from keras import layers

import tfmix
from tfmix.hardware import compilers, targets

WIDTH, ROWS, LENGTH, WORDS = 1024, 32, 256, 1008


def transformer(blocks):
    inputs = keras.Input((LENGTH,), dtype="int32")
    h = layers.Embedding(WORDS, WIDTH)(inputs)
    for _ in range(blocks):
        attended = layers.MultiHeadAttention(16, 64)(h, h)
        h = layers.LayerNormalization()(h + attended)
        wide = layers.Dense(4 * WIDTH, activation="gelu")(h)
        h = layers.LayerNormalization()(h + layers.Dense(WIDTH)(wide))
    return keras.Model(inputs, layers.Dense(WORDS)(h))


@pytest.mark.parametrize("name", ["h100", "h200", "b200"])
def test_nine_of_ten_operations_of_a_transformer_are_in_float8(name):
    if lacking := compilers.missing(targets.find(name)):
        pytest.skip(f"no {', '.join(lacking)}: run `make targets`")
    with tfmix.policy_scope("mixed_float8"):
        model = transformer(2)
    step = tfmix.compile_for(
        model,
        ROWS,
        target=name,
        optimizer="adam",
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    work = collections.Counter()
    for row in step.rows:
        work[row.dtype] += row.flops
    assert work["float8"] >= 0.9 * work.total()
    assert step.conditionals == 0
    # The products of a layer that is chosen: one forward, two backward.
    tokens = ROWS * LENGTH
    wide = [
        row
        for row in step.rows
        if sorted(row.shape) == sorted((WIDTH, 4 * WIDTH, tokens))
    ]
    assert [row.dtype for row in wide] == ["float8"] * 12
