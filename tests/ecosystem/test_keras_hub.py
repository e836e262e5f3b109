"""KerasHub's backbones compute under a policy as in float32, and train.

`make test-ecosystem` runs it in an environment of its own.
"""

import collections
import functools
import math

import keras
import numpy as np
import pytest
from keras import ops

import tfmix
from tests import helpers

models = pytest.importorskip("keras_hub").models
pytestmark = [
    helpers.requires_backend("tensorflow"),
    # KerasHub's own: T5 and ESM hand a mask to layers that take none.
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

# Routers choose all experts: among a few, rounding would decide.
EXPERTS = {"num_experts": 2, "top_k": 2}
# Largest error of a result, over its largest entry.
BOUNDS = {"mixed_float16": 0.005, "mixed_bfloat16": 0.03}
SEEDS = (1, 2, 3)
STEPS = 32
GENERATOR = np.random.default_rng(0)


def ids():
    return GENERATOR.integers(1, 30, (2, 8))


def tokens():
    return {"token_ids": ids(), "padding_mask": np.ones((2, 8), "int32")}


def segments():
    return {**tokens(), "segment_ids": np.zeros((2, 8), "int32")}


def pairs():
    parts = ("encoder", "decoder")
    return {f"{p}_{k}": v for p in parts for k, v in tokens().items()}


def unmasked():
    return {k: v for k, v in segments().items() if k != "padding_mask"}


def audio():
    decoder = {k: v for k, v in pairs().items() if k.startswith("decoder")}
    features = GENERATOR.random((2, 16, 8), "float32")
    return {"encoder_features": features, **decoder}


def images():
    return GENERATOR.random((2, 32, 32, 3), "float32")


ENCODER = {
    "vocabulary_size": 30,
    "num_layers": 2,
    "num_heads": 2,
    "hidden_dim": 16,
    "intermediate_dim": 32,
}
DECODER = {
    "vocabulary_size": 30,
    "num_layers": 2,
    "num_query_heads": 2,
    "num_key_value_heads": 1,
    "hidden_dim": 16,
    "intermediate_dim": 32,
}

BACKBONES = {
    "AlbertBackbone": (
        dict(ENCODER, num_heads=2, embedding_dim=8, max_sequence_length=16),
        segments,
    ),
    "BartBackbone": (dict(ENCODER, max_sequence_length=16), pairs),
    "BertBackbone": (dict(ENCODER, max_sequence_length=16), segments),
    "BloomBackbone": (ENCODER, tokens),
    "DebertaV3Backbone": (
        dict(ENCODER, max_sequence_length=16, bucket_size=4),
        tokens,
    ),
    "DistilBertBackbone": (dict(ENCODER, max_sequence_length=16), tokens),
    "ElectraBackbone": (
        dict(
            vocab_size=30,
            num_layers=2,
            num_heads=2,
            hidden_dim=16,
            embedding_dim=8,
            intermediate_dim=32,
            max_sequence_length=16,
        ),
        segments,
    ),
    "ESM2Backbone": (ENCODER, tokens),
    "ESMBackbone": (
        dict(ENCODER, max_sequence_length=16),
        lambda: {"token_ids": ids()},
    ),
    "FNetBackbone": (
        dict(
            vocabulary_size=30,
            num_layers=2,
            hidden_dim=16,
            intermediate_dim=32,
            max_sequence_length=16,
        ),
        unmasked,
    ),
    "FalconBackbone": (
        dict(
            vocabulary_size=30,
            num_layers=2,
            num_attention_heads=2,
            hidden_dim=16,
            intermediate_dim=32,
        ),
        tokens,
    ),
    "GPT2Backbone": (dict(ENCODER, max_sequence_length=16), tokens),
    "GPTNeoXBackbone": (dict(ENCODER, max_sequence_length=16), tokens),
    "GemmaBackbone": (dict(DECODER, head_dim=8), tokens),
    "Gemma3Backbone": (
        dict(DECODER, image_size=16, head_dim=8, query_head_dim_normalize=True),
        tokens,
    ),
    "GptOssBackbone": (dict(DECODER, **EXPERTS), tokens),
    "Llama3Backbone": (DECODER, tokens),
    "LlamaBackbone": (DECODER, tokens),
    "MistralBackbone": (DECODER, tokens),
    "MixtralBackbone": (dict(DECODER, **EXPERTS), tokens),
    "OPTBackbone": (dict(ENCODER, max_sequence_length=16), tokens),
    "Phi3Backbone": (DECODER, tokens),
    "QwenBackbone": (DECODER, tokens),
    "Qwen2Backbone": (DECODER, tokens),
    "Qwen3Backbone": (dict(DECODER, head_dim=8), tokens),
    "QwenMoeBackbone": (
        dict(
            DECODER,
            moe_intermediate_dim=16,
            shared_expert_intermediate_dim=16,
            **EXPERTS,
            head_dim=8,
        ),
        tokens,
    ),
    "Qwen3MoeBackbone": (
        dict(DECODER, moe_intermediate_dim=16, **EXPERTS, head_dim=8),
        tokens,
    ),
    "RobertaBackbone": (dict(ENCODER, max_sequence_length=16), tokens),
    "RoformerV2Backbone": (dict(ENCODER, head_size=8), unmasked),
    "T5Backbone": (ENCODER, pairs),
    "XLMRobertaBackbone": (dict(ENCODER, max_sequence_length=16), tokens),
    "XLNetBackbone": (ENCODER, segments),
    "WhisperBackbone": (
        dict(
            ENCODER,
            num_mels=8,
            max_encoder_sequence_length=16,
            max_decoder_sequence_length=16,
        ),
        audio,
    ),
    "DenseNetBackbone": (
        dict(
            stackwise_num_repeats=[1, 1],
            growth_rate=4,
            compression_ratio=0.5,
            image_shape=(32, 32, 3),
        ),
        images,
    ),
    "VGGBackbone": (
        dict(
            stackwise_num_repeats=[1, 1],
            stackwise_num_filters=[8, 8],
            image_shape=(32, 32, 3),
        ),
        images,
    ),
    "ViTBackbone": (
        dict(
            image_shape=(32, 32, 3),
            patch_size=(8, 8),
            num_layers=2,
            num_heads=2,
            hidden_dim=16,
            mlp_dim=32,
        ),
        images,
    ),
    "DeiTBackbone": (
        dict(
            image_shape=(32, 32, 3),
            patch_size=(8, 8),
            num_layers=2,
            num_heads=2,
            hidden_dim=16,
            intermediate_dim=32,
        ),
        images,
    ),
    "XceptionBackbone": (
        dict(
            stackwise_conv_filters=[[8, 8], [8, 8]],
            stackwise_pooling=[True, False],
            image_shape=(32, 32, 3),
        ),
        images,
    ),
    "ViTDetBackbone": (
        dict(
            hidden_size=16,
            num_layers=2,
            intermediate_dim=32,
            num_heads=2,
            global_attention_layer_indices=[1],
            image_shape=(32, 32, 3),
            patch_size=8,
            num_output_channels=8,
            window_size=2,
        ),
        images,
    ),
    "DINOV2Backbone": (
        dict(
            patch_size=8,
            num_layers=2,
            hidden_dim=16,
            num_heads=2,
            intermediate_dim=32,
            image_shape=(32, 32, 3),
        ),
        images,
    ),
    "SwinTransformerBackbone": (
        dict(
            image_shape=(32, 32, 3),
            embed_dim=8,
            depths=[1, 1],
            num_heads=[1, 2],
            window_size=4,
            patch_size=4,
        ),
        images,
    ),
}


@pytest.fixture(autouse=True)
def same_data_in_any_order(monkeypatch):
    monkeypatch.setitem(globals(), "GENERATOR", np.random.default_rng(0))


def made(name, policy, seed=SEEDS[0]):
    keras.utils.set_random_seed(seed)
    tfmix.set_global_policy(policy)
    return getattr(models, name)(**BACKBONES[name][0])


def results(model, inputs):
    return [
        ops.cast(one, "float32") for one in keras.tree.flatten(model(inputs))
    ]


@pytest.mark.parametrize("policy", BOUNDS)
@pytest.mark.parametrize("name", BACKBONES)
def test_a_backbone_computes_as_in_float32(name, policy, record_property):
    inputs = BACKBONES[name][1]()
    exact = made(name, "float32")
    expected = results(exact, inputs)
    model = made(name, policy)
    model.set_weights(exact.get_weights())
    errors = []
    for one, wanted in zip(results(model, inputs), expected, strict=True):
        largest = max(float(ops.max(ops.abs(wanted))), 1e-3)
        errors.append(float(ops.max(ops.abs(one - wanted))) / largest)
    record_property("error", max(errors))
    assert max(errors) < BOUNDS[policy]


def multiplications(operation):
    """Counts those of one product of a graph."""
    left, right = (tensor.shape for tensor in operation.inputs)
    if operation.type != "Einsum":
        is_matrix = operation.type == "MatMul"
        flag = "transpose_b" if is_matrix else "adj_y"
        return math.prod(left) * right[-2 if operation.get_attr(flag) else -1]
    labels = operation.get_attr("equation").decode().split("->")[0]
    sizes = dict(zip(labels.replace(",", ""), (*left, *right), strict=True))
    return math.prod(sizes.values())


@pytest.mark.parametrize("policy", BOUNDS)
@pytest.mark.parametrize("name", ["T5Backbone", "MixtralBackbone"])
def test_products_stay_in_16_bit_where_a_layer_falls_back(
    name, policy, record_property, monkeypatch
):
    import tensorflow as tf

    wide = {"hidden_dim": 512, "intermediate_dim": 2048}
    settings, inputs = BACKBONES[name]
    monkeypatch.setitem(BACKBONES, name, (settings | wide, inputs))
    model = made(name, policy)
    values = {key: np.tile(value, (1, 16)) for key, value in inputs().items()}
    call = tf.function(lambda: results(model, values), autograph=False)
    counts = collections.Counter()
    for one in call.get_concrete_function().graph.get_operations():
        if "MatMul" in one.type or one.type == "Einsum":
            counts[one.outputs[0].dtype.name] += multiplications(one)
    share = counts["float32"] / counts.total()
    record_property("share_in_float32", share)
    assert share < 0.1


def classifier(name, policy, seed=SEEDS[0]):
    """Two classes, from the mean of a backbone's first result."""
    backbone = made(name, policy, seed)
    features = keras.tree.flatten(backbone.output)[0]
    mean = ops.mean(features, axis=tuple(range(1, len(features.shape) - 1)))
    logits = tfmix.float32_output()(keras.layers.Dense(2)(mean))
    model = keras.Model(backbone.input, logits)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss, jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    return model


def trained(model, weights, inputs):
    """Returns the loss after 32 steps on one batch, from given weights."""
    model.set_weights(weights)
    losses = [
        model.train_on_batch(inputs, np.array([0, 1])) for _ in range(STEPS)
    ]
    return float(losses[-1])


@functools.cache
def in_float32(name):
    """Returns the starts and the final losses of float32 by seed."""
    inputs = BACKBONES[name][1]()
    models = [classifier(name, "float32", seed) for seed in SEEDS]
    starts = [model.get_weights() for model in models]
    # One is traced, and takes the others' places.
    model, losses = models[0], []
    slots = [v.numpy() for v in model.optimizer.variables]
    for start in starts:
        for slot, value in zip(model.optimizer.variables, slots, strict=True):
            slot.assign(value)
        losses.append(trained(model, start, inputs))
    return starts, losses


@pytest.mark.parametrize("policy", BOUNDS)
@pytest.mark.parametrize("name", BACKBONES)
def test_a_backbone_trains_as_in_float32(name, policy, record_property):
    starts, expected = in_float32(name)
    inputs = BACKBONES[name][1]()
    model = classifier(name, policy)
    loss = trained(model, starts[0], inputs)
    record_property("loss", loss)
    record_property("float32", expected)
    # Three seeds show less than the whole noise; 1 % of what it starts from.
    noise = max(expected) - min(expected) + 0.01 * np.log(2)
    assert min(expected) - noise <= loss <= max(expected) + noise
