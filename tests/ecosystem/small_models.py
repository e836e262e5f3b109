"""Small versions of KerasHub's backbones, their inputs and their training."""

import functools
import inspect

import keras
import numpy as np
import pytest
from keras import ops

import tfmix

models = pytest.importorskip("keras_hub").models

SEEDS = (1, 2, 3)
# The number of float32 runs per seed, with different dropout.
DRAWS = 3
STEPS = 32
# The largest allowed error of a result, over its norm.
BOUNDS = {"mixed_float16": 0.005, "mixed_bfloat16": 0.03}


def tokens(random):
    ids = random.integers(1, 30, (2, 8))
    return {"token_ids": ids, "padding_mask": np.ones((2, 8), "int32")}


def ids(random):
    return {"token_ids": tokens(random)["token_ids"]}


def unmasked(random):
    return {**ids(random), "segment_ids": np.zeros((2, 8), "int32")}


def segments(random):
    return {**tokens(random), "segment_ids": np.zeros((2, 8), "int32")}


def pairs(random):
    parts = ("encoder", "decoder")
    return {f"{p}_{k}": v for p in parts for k, v in tokens(random).items()}


def decoded(random):
    return {f"decoder_{k}": v for k, v in tokens(random).items()}


def audio(random):
    features = random.random((2, 16, 8), "float32")
    return {"encoder_features": features, **decoded(random)}


def sound(random):
    wave = random.normal(size=(2, 4000, 1)).astype("float32")
    mask = np.ones((2, 4000), "int32")
    encoded = {"encoder_input_values": wave, "encoder_padding_mask": mask}
    return {**encoded, **decoded(random)}


def images(random):
    return random.random((2, 32, 32, 3), "float32")


def pixels(random):
    return {"pixel_values": images(random)}


def image_and_text(random):
    return {"images": images(random), **ids(random)}


def image_and_response(random):
    picture = random.random((2, 16, 16, 3), "float32")
    mask = np.zeros((2, 8), "int32")
    return {**tokens(random), "images": picture, "response_mask": mask}


def with_positions(random):
    return {**tokens(random), "position_ids": np.tile(np.arange(8), (2, 1))}


def chunks(random):
    """Returns twice as many tokens: the backbone computes in chunks of 16."""
    return {k: np.tile(v, (1, 2)) for k, v in tokens(random).items()}


# The backbones by their inputs.
BACKBONES = {
    f"{name}Backbone": inputs
    for inputs, names in {
        tokens: "Bloom DebertaV3 DistilBert Falcon GPT2 GPTNeoX Gemma Gemma3 "
        "GptOss Llama3 Llama Mistral Mixtral OPT Phi3 Qwen Qwen2 Qwen3 QwenMoe "
        "Qwen3Moe Roberta XLMRoberta SmolLM3 Gemma3n Qwen3_5 Qwen3_5Moe",
        images: "ViT DeiT ViTDet DINOV2 SwinTransformer ResNet CSPNet HGNetV2 "
        "MiT SegFormer DeepLabV3 RetinaNet",
        segments: "Albert Bert Electra XLNet",
        pairs: "Bart T5 T5Gemma T5Gemma2 EdRec",
        ids: "ESM2 ESM",
        unmasked: "FNet RoformerV2",
        audio: "Whisper",
        pixels: "DINOV3",
        image_and_text: "CLIP SigLIP",
        image_and_response: "PaliGemma",
        sound: "Moonshine",
        with_positions: "Gemma4",
        chunks: "RWKV7",
    }.items()
    for name in names.split()
}
# The small value of each argument that a backbone requires.
SMALL = {
    name: value
    for value, names in (
        (0, "pad_token_id max_drop_path_rate attention_dropout"),
        (
            1,
            "num_key_value_heads decoder_num_key_value_heads stem_strides "
            "encoder_num_key_value_heads vit_num_layers num_layers_enc "
            "num_layers_dec partial_rotary_factor",
        ),
        (
            2,
            "num_layers num_heads num_query_heads num_attention_heads "
            "num_hidden_layers encoder_num_layers decoder_num_layers "
            "encoder_num_heads decoder_num_heads encoder_num_attention_heads "
            "decoder_num_attention_heads num_experts top_k altup_num_inputs "
            "vit_num_heads upsampling_size",
        ),
        (3, "stem_kernel_size min_level"),
        (
            4,
            "laurel_rank hidden_size_per_layer_input window_size "
            "sliding_window",
        ),
        (5, "max_level"),
        (
            8,
            "head_dim head_size embedding_dim embed_dim projection_dim "
            "encoder_head_dim decoder_head_dim patch_size projection_filters "
            "vit_hidden_dim vit_patch_size embedding_size stem_filters",
        ),
        (
            16,
            "hidden_dim encoder_hidden_dim decoder_hidden_dim hidden_size "
            "text_hidden_size max_sequence_length image_size filter_dim "
            "moe_intermediate_dim shared_expert_intermediate_dim "
            "shared_expert_intermediate_size",
        ),
        (
            30,
            "vocabulary_size vocab_size text_vocab_size "
            "vocab_size_per_layer_input",
        ),
        (
            32,
            "intermediate_dim encoder_intermediate_dim "
            "decoder_intermediate_dim mlp_dim max_position_embeddings",
        ),
        ((32, 32, 3), "image_shape"),
        (1e4, "rope_theta"),
        (1e-6, "layer_norm_epsilon"),
        (True, "use_learnable_affine_block"),
        (False, "attention_bias mlp_bias use_p5"),
        ([False, True], "apply_downsample use_lightweight_conv_block"),
        ([True, False], "rope_layer_enabled_list"),
        (
            [1, 1],
            "depths layerwise_depths stackwise_num_blocks stackwise_depth",
        ),
        ([1, 2], "layerwise_num_heads stackwise_num_strides stackwise_strides"),
        ([2], "dilation_rates"),
        ([2, 1], "layerwise_sr_ratios"),
        ([4, 2], "layerwise_strides"),
        ([7, 3], "layerwise_patch_sizes"),
        ([8, 8], "stackwise_num_filters"),
        ([8, 16], "hidden_sizes"),
        ([32, 32], "intermediate_size"),
        (["full_attention"] * 2, "layer_types"),
        (
            ["sliding_attention", "full_attention"],
            "encoder_layer_types decoder_layer_types",
        ),
    )
    for name in names.split()
}
# These get their small value where they are optional, too. All experts are
# chosen, because rounding would decide a choice.
ALSO = {"image_shape", "max_sequence_length", "top_k"}
LINEAR = {
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    "layer_types": ["linear_attention", "full_attention"],
    "partial_rotary_factor": 0.5,
}
T5_GEMMA = {
    "sliding_window": 4,
    "cross_attention_hidden_size": 16,
    # At 1, the default, rounding the weights already causes an error of 0.03.
    "query_pre_attn_scalar": 64.0,
}


def resnet(stages):
    """Builds the encoder of a detector or segmenter."""
    return build(
        "ResNetBackbone",
        stackwise_num_filters=[64] * stages,
        stackwise_num_blocks=[1] * stages,
        stackwise_num_strides=[1] + [2] * (stages - 1),
    )


# Other arguments; a function makes an encoder under the active policy.
MORE = {
    "CLIPBackbone": {
        "vision_encoder": lambda: build("CLIPVisionEncoder"),
        "text_encoder": lambda: text_encoder("CLIPTextEncoder"),
    },
    "CSPNetBackbone": {
        "stackwise_num_filters": [8, 16],
        "block_type": "dark_block",
        "stem_padding": "same",
        "stage_type": "csp",
        "bottle_ratio": [0.5],
        "expand_ratio": [2.0],
    },
    "DebertaV3Backbone": {"bucket_size": 4},
    "DeepLabV3Backbone": {
        "image_encoder": lambda: resnet(2),
        "spatial_pyramid_pooling_key": "P3",
        "low_level_feature_key": "P2",
        "projection_filters": 8,
    },
    "DeiTBackbone": {"patch_size": (8, 8)},
    "Gemma3Backbone": {"query_head_dim_normalize": True},
    "Gemma3nBackbone": {
        "layer_types": ["sliding_attention", "full_attention"],
        "hidden_activation": "gelu_approximate",
    },
    "HGNetV2Backbone": {
        "stem_channels": [3, 8, 8],
        "hidden_act": "relu",
        "stackwise_stage_filters": [(8, 8, 8, 1, 1, 3), (8, 8, 16, 1, 1, 3)],
    },
    "MiTBackbone": {"hidden_dims": [8, 16]},
    "MoonshineBackbone": dict.fromkeys(
        ("encoder_num_layers", "decoder_num_layers"), 1
    ),
    "QwenMoeBackbone": {"head_dim": 8},
    "Qwen3MoeBackbone": {"head_dim": 8},
    "Qwen3_5Backbone": LINEAR,
    "Qwen3_5MoeBackbone": LINEAR,
    "ResNetBackbone": {
        "input_conv_filters": [64],
        "input_conv_kernel_sizes": [3],
        "stackwise_num_filters": [64, 64],
        "block_type": "basic_block",
    },
    "RWKV7Backbone": dict.fromkeys(
        ("gate_lora", "mv_lora", "aaa_lora", "decay_lora"), 8
    ),
    "RetinaNetBackbone": {"image_encoder": lambda: resnet(4)},
    "SegFormerBackbone": {"image_encoder": lambda: build("MiTBackbone")},
    "SigLIPBackbone": {
        "vision_encoder": lambda: build("SigLIPVisionEncoder"),
        "text_encoder": lambda: text_encoder("SigLIPTextEncoder"),
    },
    "SwinTransformerBackbone": {"num_heads": [1, 2], "patch_size": 4},
    "T5GemmaBackbone": T5_GEMMA,
    "T5Gemma2Backbone": T5_GEMMA,
    "ViTBackbone": {"patch_size": (8, 8)},
    "ViTDetBackbone": {
        "patch_size": 8,
        "num_output_channels": 8,
        "window_size": 2,
        "global_attention_layer_indices": [1],
    },
    "WhisperBackbone": {
        "num_mels": 8,
        "max_encoder_sequence_length": 16,
        "max_decoder_sequence_length": 16,
    },
}


def text_encoder(name):
    return build(name, embedding_dim=16, max_sequence_length=8)


def build(name, **changes):
    """Builds a small version of one of KerasHub's classes."""
    kind = getattr(models, name)
    given = {
        one.name: SMALL[one.name]
        for one in inspect.signature(kind).parameters.values()
        if one.name in ALSO or one.default is one.empty
        if one.name in SMALL
    } | MORE.get(name, {})
    given = {key: v() if callable(v) else v for key, v in given.items()}
    return kind(**given | changes)


@functools.cache
def batch(name):
    """Returns the inputs of a backbone, the same in any order of tests."""
    return BACKBONES[name](np.random.default_rng(0))


def make_model(name, policy, seed=SEEDS[0], **changes):
    """Creates a backbone under a policy."""
    keras.utils.set_random_seed(seed)
    tfmix.set_global_policy(policy)
    return build(name, **changes)


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
