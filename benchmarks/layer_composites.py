"""Recipes that need several inputs, other layers or other arguments."""

import keras
import numpy as np

from benchmarks.layer_recipe import Recipe


def recipes() -> dict[str, Recipe]:
    """Returns the recipes by their labels."""
    layers = keras.layers
    pair = ((2, 16, 32), (2, 16, 32))
    state = ((4, 32), (4, 16))
    found = {
        "AdditiveAttention": Recipe(
            lambda: layers.AdditiveAttention(), pair, as_list=True
        ),
        "Attention": Recipe(lambda: layers.Attention(), pair, as_list=True),
        "Average": Recipe(
            lambda: layers.Average(), ((2, 32),) * 300, as_list=True
        ),
        "Bidirectional": Recipe(
            lambda: layers.Bidirectional(layers.LSTM(8)), ((4, 12, 32),)
        ),
        "Dot": Recipe(
            lambda: layers.Dot(axes=1), ((4, 256), (4, 256)), as_list=True
        ),
        "Dot(normalize=True)": Recipe(
            lambda: layers.Dot(axes=1, normalize=True),
            ((4, 1024), (4, 1024)),
            as_list=True,
        ),
        "GRUCell": Recipe(lambda: layers.GRUCell(16), state),
        "GroupQueryAttention": Recipe(
            lambda: layers.GroupQueryAttention(16, 4, 2), pair
        ),
        "LSTMCell": Recipe(
            lambda: layers.LSTMCell(16), ((4, 32), ((4, 16), (4, 16)))
        ),
        "MultiHeadAttention": Recipe(
            lambda: layers.MultiHeadAttention(4, 16), pair
        ),
        "MultiHeadAttention(dropout=0.1)": Recipe(
            lambda: layers.MultiHeadAttention(4, 16, dropout=0.1), pair
        ),
        "GroupQueryAttention(dropout=0.1)": Recipe(
            lambda: layers.GroupQueryAttention(16, 4, 2, dropout=0.1), pair
        ),
        "GlobalAveragePooling1D(mask)": Recipe(
            lambda: layers.GlobalAveragePooling1D(),
            ((2, 4096, 8),),
            call={"mask": np.ones((2, 4096), bool)},
        ),
        "Normalization": Recipe(
            lambda: layers.Normalization(mean=100.0, variance=4.0),
            ((16, 32),),
        ),
        "Pipeline": Recipe(
            lambda: layers.Pipeline(
                [layers.Rescaling(1 / 255.0), layers.CenterCrop(8, 8)]
            ),
            ((2, 16, 16, 3),),
        ),
        "RNN": Recipe(lambda: layers.RNN(layers.GRUCell(16)), ((4, 12, 32),)),
        "SimpleRNNCell": Recipe(lambda: layers.SimpleRNNCell(16), state),
        "Softmax(axis=(1, 2))": Recipe(
            lambda: layers.Softmax(axis=(1, 2)), ((4, 32, 32),)
        ),
        "SpectralNormalization": Recipe(
            lambda: layers.SpectralNormalization(layers.Dense(32)),
            ((16, 128),),
            training=False,
        ),
        "StackedRNNCells": Recipe(
            lambda: layers.RNN(
                layers.StackedRNNCells(
                    [layers.LSTMCell(8), layers.SimpleRNNCell(8)]
                )
            ),
            ((4, 12, 32),),
        ),
        "TimeDistributed": Recipe(
            lambda: layers.TimeDistributed(layers.Dense(16)), ((4, 12, 64),)
        ),
    }
    found["CategoryEncoding"] = Recipe(
        lambda: layers.CategoryEncoding(64, output_mode="count"),
        ((4, 12),),
        call={"ids": 64},
    )
    found["Embedding"] = Recipe(
        lambda: layers.Embedding(64, 16), ((4, 12),), call={"ids": 64}
    )
    if hasattr(layers, "ReversibleEmbedding"):
        found["ReversibleEmbedding"] = Recipe(
            lambda: layers.ReversibleEmbedding(64, 32),
            ((4, 32),),
            call={"reverse": True},
        )
    return found
