"""KerasHub's backbones compute under a policy as in float32, and train.

`make test-ecosystem` runs it in an environment of its own.
"""

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

# Largest error of a result, over its largest entry.
BOUNDS = {"mixed_float16": 0.005, "mixed_bfloat16": 0.03}
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
    "GptOssBackbone": (dict(DECODER, num_experts=4, top_k=2), tokens),
    "Llama3Backbone": (DECODER, tokens),
    "LlamaBackbone": (DECODER, tokens),
    "MistralBackbone": (DECODER, tokens),
    "MixtralBackbone": (dict(DECODER, num_experts=4, top_k=2), tokens),
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
            num_experts=4,
            top_k=2,
            head_dim=8,
        ),
        tokens,
    ),
    "Qwen3MoeBackbone": (
        dict(
            DECODER, moe_intermediate_dim=16, num_experts=4, top_k=2, head_dim=8
        ),
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


def made(name, policy):
    keras.utils.set_random_seed(3)
    tfmix.set_global_policy(policy)
    return getattr(models, name)(**BACKBONES[name][0])


def results(model, inputs):
    return [
        ops.cast(one, "float32") for one in keras.tree.flatten(model(inputs))
    ]


def gradient_is_finite(model, inputs):
    import tensorflow as tf

    with tf.GradientTape() as tape:
        loss = sum(tf.reduce_mean(one**2) for one in results(model, inputs))
        loss *= 1024.0
    found = tape.gradient(loss, model.trainable_weights)
    return bool(tfmix.all_finite([one for one in found if one is not None]))


@pytest.mark.parametrize("policy", BOUNDS)
@pytest.mark.parametrize("name", BACKBONES)
def test_a_backbone_computes_as_in_float32(name, policy):
    inputs = BACKBONES[name][1]()
    exact = made(name, "float32")
    expected = results(exact, inputs)
    model = made(name, policy)
    model.set_weights(exact.get_weights())
    for one, wanted in zip(results(model, inputs), expected, strict=True):
        largest = max(float(ops.max(ops.abs(wanted))), 1e-3)
        error = float(ops.max(ops.abs(one - wanted))) / largest
        assert error < BOUNDS[policy]
    assert gradient_is_finite(model, inputs)
