"""Attention has finite logits, and 16-bit products on a GPU."""

import keras
import numpy as np
import pytest
from keras import ops as kops

from tests import helpers
from tfmix._keras import context, replacing
from tfmix.autocast.global_policy import policy_scope


@pytest.fixture(autouse=True)
def _no_rules_after():
    yield
    replacing.install(())


@pytest.mark.parametrize(
    ("layer_class", "arguments"),
    [
        (keras.layers.MultiHeadAttention, {"num_heads": 2, "key_dim": 8}),
        (
            keras.layers.GroupQueryAttention,
            {"head_dim": 8, "num_query_heads": 2, "num_key_value_heads": 1},
        ),
    ],
)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("scores", [False, True])
@pytest.mark.parametrize("platform", ["", "cuda"])
def test_attention_of_large_queries_is_finite(
    layer_class, arguments, dropout, scores, platform
):
    layer = layer_class(**arguments, dropout=dropout, dtype="mixed_float16")
    x = np.random.default_rng(4).normal(size=(2, 8, 16)) * 400
    mask = np.ones((2, 8, 8), bool)

    def run():
        result = layer(
            x, x, attention_mask=mask, return_attention_scores=scores
        )
        return keras.tree.flatten(result)

    run()
    replacing.install(["dot_product_attention"])
    with context.compiled_for(platform):
        results = run()
    for tensor_ in results:
        assert helpers.dtype_of(tensor_) == "float16"
        helpers.assert_all_finite([tensor_])
    assert layer._softmax.dtype_policy.name == "mixed_float16"


@helpers.requires_backend("tensorflow")
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_attention_multiplies_16_bit_factors_on_a_gpu(policy):
    import tensorflow as tf

    rng = np.random.default_rng(0)
    # Unscaled logits of such queries exceed float16.
    size = 60 if policy == "mixed_float16" else 1
    query, key, value = rng.normal(size=(3, 2, 6, 2, 8))
    factors = [
        kops.cast(x, policy.removeprefix("mixed_"))
        for x in (query * size**2, key * size, value)
    ]
    exact = kops.dot_product_attention(
        *[kops.cast(x, "float32") for x in factors]
    )
    attend = tf.function(lambda *factors: kops.dot_product_attention(*factors))
    with policy_scope(policy), context.compiled_for("cuda"):
        graph = attend.get_concrete_function(*factors).graph
        found = attend(*factors)
    products = [op for op in graph.get_operations() if op.type == "Einsum"]
    assert {x.dtype for op in products for x in op.inputs} == {factors[0].dtype}
    limit = 0.002 if policy == "mixed_float16" else 0.02
    error = np.linalg.norm(kops.cast(found, "float32") - exact)
    assert error < limit * np.linalg.norm(exact)
