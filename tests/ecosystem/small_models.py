"""Small versions of KerasHub's backbones, their inputs and their training."""

import functools

import keras
import numpy as np
import pytest
from keras import ops

import tfmix

models = pytest.importorskip("keras_hub").models

# Routers choose all experts, because rounding would decide a choice.
EXPERTS = {"num_experts": 2, "top_k": 2}
SEEDS = (1, 2, 3)
# The number of float32 runs per seed, with different dropout.
DRAWS = 3
STEPS = 32
# The largest allowed error of a result, over its norm.
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


IMAGE = (32, 32, 3)
GEMMA = {
    "hidden_dim": 16,
    "intermediate_dim": 32,
    "num_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}
T5_GEMMA = {
    **{f"{p}_{k}": v for p in ("encoder", "decoder") for k, v in GEMMA.items()},
    "vocabulary_size": 30,
    "sliding_window": 4,
    "cross_attention_hidden_size": 16,
    # At 1, the default, rounding the weights already causes an error of 0.03.
    "query_pre_attn_scalar": 64.0,
}
LINEAR = {
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "partial_rotary_factor": 0.5,
}
RESNET = {
    "input_conv_filters": [64],
    "input_conv_kernel_sizes": [3],
    "stackwise_num_filters": [64, 64],
    "stackwise_num_blocks": [1, 1],
    "stackwise_num_strides": [1, 2],
    "block_type": "basic_block",
    "image_shape": IMAGE,
}
MIT = {
    "layerwise_depths": [1, 1],
    "num_layers": 2,
    "layerwise_num_heads": [1, 2],
    "layerwise_sr_ratios": [2, 1],
    "max_drop_path_rate": 0.0,
    "layerwise_patch_sizes": [7, 3],
    "layerwise_strides": [4, 2],
    "image_shape": IMAGE,
    "hidden_dims": [8, 16],
}
SIGHT = {
    "patch_size": 8,
    "hidden_dim": 16,
    "num_layers": 2,
    "num_heads": 2,
    "intermediate_dim": 32,
    "image_shape": IMAGE,
}
SPEECH = {
    "vocabulary_size": 30,
    "embedding_dim": 16,
    "hidden_dim": 16,
    "num_layers": 2,
    "num_heads": 2,
    "intermediate_dim": 32,
    "max_sequence_length": 8,
}


def image_and_text():
    return {"images": images(), "token_ids": ids()}


def image_and_response():
    picture = GENERATOR.random((2, 16, 16, 3), "float32")
    mask = np.zeros((2, 8), "int32")
    return {**tokens(), "images": picture, "response_mask": mask}


def sound():
    decoder = {k: v for k, v in pairs().items() if k.startswith("decoder")}
    wave = GENERATOR.normal(size=(2, 4000, 1)).astype("float32")
    mask = np.ones((2, 4000), "int32")
    return {
        "encoder_input_values": wave,
        "encoder_padding_mask": mask,
        **decoder,
    }


def placed():
    return {**tokens(), "position_ids": np.tile(np.arange(8), (2, 1))}


# The settings of a backbone; one may be a function, which creates it under the
# active policy.
OF_TOKENS = {
    "BloomBackbone": ENCODER,
    "DebertaV3Backbone": dict(ENCODER, max_sequence_length=16, bucket_size=4),
    "DistilBertBackbone": dict(ENCODER, max_sequence_length=16),
    "FalconBackbone": dict(
        vocabulary_size=30,
        num_layers=2,
        num_attention_heads=2,
        hidden_dim=16,
        intermediate_dim=32,
    ),
    "GPT2Backbone": dict(ENCODER, max_sequence_length=16),
    "GPTNeoXBackbone": dict(ENCODER, max_sequence_length=16),
    "GemmaBackbone": dict(DECODER, head_dim=8),
    "Gemma3Backbone": dict(
        DECODER, image_size=16, head_dim=8, query_head_dim_normalize=True
    ),
    "GptOssBackbone": dict(DECODER, **EXPERTS),
    "Llama3Backbone": DECODER,
    "LlamaBackbone": DECODER,
    "MistralBackbone": DECODER,
    "MixtralBackbone": dict(DECODER, **EXPERTS),
    "OPTBackbone": dict(ENCODER, max_sequence_length=16),
    "Phi3Backbone": DECODER,
    "QwenBackbone": DECODER,
    "Qwen2Backbone": DECODER,
    "Qwen3Backbone": dict(DECODER, head_dim=8),
    "QwenMoeBackbone": dict(
        DECODER,
        moe_intermediate_dim=16,
        shared_expert_intermediate_dim=16,
        **EXPERTS,
        head_dim=8,
    ),
    "Qwen3MoeBackbone": dict(
        DECODER, moe_intermediate_dim=16, **EXPERTS, head_dim=8
    ),
    "RobertaBackbone": dict(ENCODER, max_sequence_length=16),
    "XLMRobertaBackbone": dict(ENCODER, max_sequence_length=16),
    "SmolLM3Backbone": dict(
        vocabulary_size=30,
        hidden_dim=16,
        intermediate_dim=32,
        num_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        attention_bias=False,
        attention_dropout=0.0,
        rope_layer_enabled_list=[True, False],
        layer_types=["full_attention"] * 2,
        mlp_bias=False,
        layer_norm_epsilon=1e-6,
        max_position_embeddings=32,
        rope_theta=1e4,
        partial_rotary_factor=1.0,
    ),
    "Gemma3nBackbone": dict(
        text_vocab_size=30,
        text_hidden_size=16,
        num_hidden_layers=2,
        pad_token_id=0,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=[32, 32],
        hidden_activation="gelu_approximate",
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=4,
        rope_theta=1e4,
        max_position_embeddings=32,
        vocab_size_per_layer_input=30,
        hidden_size_per_layer_input=4,
        altup_num_inputs=2,
        laurel_rank=4,
    ),
    "Qwen3_5Backbone": dict(DECODER, **LINEAR),
    "Qwen3_5MoeBackbone": dict(
        {k: v for k, v in DECODER.items() if k != "intermediate_dim"},
        moe_intermediate_dim=16,
        shared_expert_intermediate_size=16,
        **EXPERTS,
        **LINEAR,
    ),
}
OF_IMAGES = {
    "DenseNetBackbone": dict(
        stackwise_num_repeats=[1, 1],
        growth_rate=4,
        compression_ratio=0.5,
        image_shape=IMAGE,
    ),
    "VGGBackbone": dict(
        stackwise_num_repeats=[1, 1],
        stackwise_num_filters=[8, 8],
        image_shape=IMAGE,
    ),
    "ViTBackbone": dict(
        image_shape=IMAGE,
        patch_size=(8, 8),
        num_layers=2,
        num_heads=2,
        hidden_dim=16,
        mlp_dim=32,
    ),
    "DeiTBackbone": dict(
        image_shape=IMAGE,
        patch_size=(8, 8),
        num_layers=2,
        num_heads=2,
        hidden_dim=16,
        intermediate_dim=32,
    ),
    "XceptionBackbone": dict(
        stackwise_conv_filters=[[8, 8], [8, 8]],
        stackwise_pooling=[True, False],
        image_shape=IMAGE,
    ),
    "ViTDetBackbone": dict(
        hidden_size=16,
        num_layers=2,
        intermediate_dim=32,
        num_heads=2,
        global_attention_layer_indices=[1],
        image_shape=IMAGE,
        patch_size=8,
        num_output_channels=8,
        window_size=2,
    ),
    "DINOV2Backbone": dict(
        patch_size=8,
        num_layers=2,
        hidden_dim=16,
        num_heads=2,
        intermediate_dim=32,
        image_shape=IMAGE,
    ),
    "SwinTransformerBackbone": dict(
        image_shape=IMAGE,
        embed_dim=8,
        depths=[1, 1],
        num_heads=[1, 2],
        window_size=4,
        patch_size=4,
    ),
    "ResNetBackbone": RESNET,
    "MobileNetBackbone": dict(
        stackwise_expansion=[[1], [8]],
        stackwise_num_blocks=[1, 1],
        stackwise_num_filters=[[8], [8]],
        stackwise_kernel_size=[[3], [3]],
        stackwise_num_strides=[[1], [2]],
        stackwise_se_ratio=[[0.25], [None]],
        stackwise_activation=[["relu"], ["hard_swish"]],
        stackwise_padding=[[1], [1]],
        output_num_filters=16,
        depthwise_filters=8,
        depthwise_stride=2,
        depthwise_residual=False,
        last_layer_filter=16,
        image_shape=IMAGE,
    ),
    "EfficientNetBackbone": dict(
        stackwise_width_coefficients=[1.0, 1.0],
        stackwise_depth_coefficients=[1.0, 1.0],
        stackwise_kernel_sizes=[3, 3],
        stackwise_num_repeats=[1, 1],
        stackwise_input_filters=[8, 8],
        stackwise_output_filters=[8, 16],
        stackwise_expansion_ratios=[1, 2],
        stackwise_squeeze_and_excite_ratios=[0.25, 0.25],
        stackwise_strides=[1, 2],
        stackwise_block_types=["v1", "v1"],
        num_features=16,
        input_shape=IMAGE,
        dropout=0.0,
    ),
    "CSPNetBackbone": dict(
        stem_filters=8,
        stem_kernel_size=3,
        stem_strides=1,
        stem_padding="same",
        stackwise_depth=[1, 1],
        stackwise_strides=[1, 2],
        stackwise_num_filters=[8, 16],
        block_type="dark_block",
        stage_type="csp",
        bottle_ratio=[0.5],
        expand_ratio=[2.0],
        image_shape=IMAGE,
    ),
    "HGNetV2Backbone": dict(
        depths=[1, 1],
        embedding_size=8,
        hidden_sizes=[8, 16],
        stem_channels=[3, 8, 8],
        hidden_act="relu",
        use_learnable_affine_block=True,
        stackwise_stage_filters=[
            (8, 8, 8, 1, 1, 3),
            (8, 8, 16, 1, 1, 3),
        ],
        apply_downsample=[False, True],
        use_lightweight_conv_block=[False, True],
        image_shape=IMAGE,
    ),
    "MiTBackbone": MIT,
    "SegFormerBackbone": dict(
        image_encoder=lambda: models.MiTBackbone(**MIT),
        projection_filters=8,
    ),
    "DeepLabV3Backbone": dict(
        image_encoder=lambda: models.ResNetBackbone(**RESNET),
        spatial_pyramid_pooling_key="P3",
        low_level_feature_key="P2",
        upsampling_size=2,
        dilation_rates=[2],
        projection_filters=8,
        image_shape=IMAGE,
    ),
    "RetinaNetBackbone": dict(
        image_encoder=lambda: models.ResNetBackbone(
            **RESNET
            | {
                "stackwise_num_filters": [64] * 4,
                "stackwise_num_blocks": [1] * 4,
                "stackwise_num_strides": [1, 2, 2, 2],
            }
        ),
        min_level=3,
        max_level=5,
        use_p5=False,
        image_shape=IMAGE,
    ),
}
BACKBONES = {
    "AlbertBackbone": (
        dict(ENCODER, num_heads=2, embedding_dim=8, max_sequence_length=16),
        segments,
    ),
    "BartBackbone": (dict(ENCODER, max_sequence_length=16), pairs),
    "BertBackbone": (dict(ENCODER, max_sequence_length=16), segments),
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
    "ESM2Backbone": (ENCODER, lambda: {"token_ids": ids()}),
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
    "RoformerV2Backbone": (dict(ENCODER, head_size=8), unmasked),
    "T5Backbone": (ENCODER, pairs),
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
    "DINOV3Backbone": (SIGHT, lambda: {"pixel_values": images()}),
    "CLIPBackbone": (
        dict(
            vision_encoder=lambda: models.CLIPVisionEncoder(**SIGHT),
            text_encoder=lambda: models.CLIPTextEncoder(**SPEECH),
            projection_dim=8,
        ),
        image_and_text,
    ),
    "SigLIPBackbone": (
        dict(
            vision_encoder=lambda: models.SigLIPVisionEncoder(**SIGHT),
            text_encoder=lambda: models.SigLIPTextEncoder(**SPEECH),
        ),
        image_and_text,
    ),
    "PaliGemmaBackbone": (
        dict(
            DECODER,
            image_size=16,
            head_dim=8,
            vit_patch_size=8,
            vit_num_heads=2,
            vit_hidden_dim=8,
            vit_num_layers=1,
        ),
        image_and_response,
    ),
    "MoonshineBackbone": (
        dict(
            vocabulary_size=30,
            filter_dim=16,
            encoder_num_layers=1,
            decoder_num_layers=1,
            hidden_dim=16,
            intermediate_dim=32,
            encoder_num_heads=2,
            decoder_num_heads=2,
        ),
        sound,
    ),
    "T5GemmaBackbone": (T5_GEMMA, pairs),
    "T5Gemma2Backbone": (T5_GEMMA, pairs),
    "Gemma4Backbone": (dict(DECODER, image_size=16, head_dim=8), placed),
    "RWKV7Backbone": (
        dict(
            hidden_size=16,
            head_size=8,
            num_layers=2,
            vocabulary_size=30,
            intermediate_dim=32,
            gate_lora=8,
            mv_lora=8,
            aaa_lora=8,
            decay_lora=8,
        ),
        # The backbone computes in chunks of 16.
        lambda: {k: np.tile(v, (1, 2)) for k, v in tokens().items()},
    ),
    "EdRecBackbone": (
        dict(
            vocab_size=30,
            num_layers_enc=1,
            num_layers_dec=1,
            hidden_dim=16,
            intermediate_dim=32,
            num_heads=2,
        ),
        pairs,
    ),
}
BACKBONES |= {name: (settings, tokens) for name, settings in OF_TOKENS.items()}
BACKBONES |= {name: (settings, images) for name, settings in OF_IMAGES.items()}


@functools.cache
def batch(name):
    """Returns the inputs of a backbone, the same in any order of tests."""
    global GENERATOR
    GENERATOR = np.random.default_rng(0)
    return BACKBONES[name][1]()


def made(name, policy, seed=SEEDS[0]):
    """Creates a backbone under a policy."""
    keras.utils.set_random_seed(seed)
    tfmix.set_global_policy(policy)
    settings = BACKBONES[name][0].items()
    given = {key: v() if callable(v) else v for key, v in settings}
    return getattr(models, name)(**given)


def results(model, inputs):
    # Without `training`, a layer's default would decide for later layers.
    found = keras.tree.flatten(model(inputs, training=False))
    return [ops.convert_to_numpy(ops.cast(one, "float32")) for one in found]


def errors(model, inputs, expected):
    """Returns each result's error, as its norm over the expected norm."""
    return [
        float(np.linalg.norm(one - right) / max(np.linalg.norm(right), 1e-3))
        for one, right in zip(results(model, inputs), expected, strict=True)
    ]


def trained(model, weights, data):
    """Returns the loss after 32 steps on one batch, from given weights."""
    model.set_weights(weights)
    for _ in range(STEPS):
        loss = np.ravel(model.train_on_batch(*data))[0]
    return float(loss)


def in_float32(make, data):
    """Returns the starts and the final losses of float32 by seed."""
    made = [make("float32", seed) for seed in SEEDS]
    starts = [model.get_weights() for model in made]
    # Only one model is traced; it gets the weights of the others. Its dropout
    # differs in each run.
    model, losses = made[0], []
    slots = [v.numpy() for v in model.optimizer.variables]
    for start in starts * DRAWS:
        for slot, value in zip(model.optimizer.variables, slots, strict=True):
            slot.assign(value)
        losses.append(trained(model, start, data))
    return starts, losses


def assert_inside(loss, expected):
    """Compares with float32's noise."""
    # So few runs do not show all noise, so 1 % of the first loss, that of two
    # classes, is added.
    noise = max(expected) - min(expected) + 0.01 * np.log(2)
    assert min(expected) - noise <= loss <= max(expected) + noise
