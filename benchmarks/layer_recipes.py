"""Recipes that build each layer and activation of Keras for the sweep."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

# The shape of one input. The state of a cell may be a tuple of shapes.
Shape = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One way to build a layer or activation, and the shapes of its inputs.

    Attributes:
        make: Function that builds it; called once for every policy.
        shapes: The shape of each input, batch included.
        training: The `training` argument, `None` for none.
        call: Further arguments of the call.
        as_list: Whether the inputs are passed as one list.
    """

    make: Callable[[], Any]
    shapes: tuple[Shape, ...]
    training: bool | None = None
    call: dict[str, Any] = dataclasses.field(default_factory=dict)
    as_list: bool = False


# These layers are not swept, with the reason. A test fails for layers that are
# neither here nor in a recipe.
NOT_SWEPT = {
    "Discretization": "gives integers, has no gradient",
    "FlaxLayer": "wraps another library",
    "HashedCrossing": "takes integers",
    "Hashing": "takes integers or strings",
    "Input": "a function",
    "InputLayer": "computes nothing",
    "InputSpec": "no layer",
    "IntegerLookup": "takes integers",
    "JaxLayer": "wraps another library",
    "Lambda": "runs the user's function",
    "Layer": "a base class",
    "MaxNumBoundingBoxes": "pads bounding boxes, not tensors",
    "StringLookup": "takes strings",
    "TFSMLayer": "wraps a SavedModel",
    "TextVectorization": "takes strings",
    "TorchModuleWrapper": "wraps another library",
    "Wrapper": "a base class",
}

# Random layers are swept in inference, because the random numbers of two dtypes
# differ in training.
_SEQUENCE = (4, 32, 64)
_IMAGE = (2, 16, 16, 3)
_MAP = (2, 16, 16, 8)
_VOLUME = (2, 8, 8, 8, 4)
_RANDOM_IMAGE_LAYERS: dict[str, dict[str, Any]] = {
    "AugMix": {},
    "CutMix": {},
    "MixUp": {},
    "Mosaic": {},
    "RandAugment": {},
    "RandomBrightness": {"factor": 0.2},
    "RandomColorDegeneration": {"factor": 0.5},
    "RandomColorJitter": {},
    "RandomCrop": {"height": 8, "width": 8},
    "RandomContrast": {"factor": 0.2},
    "RandomElasticTransform": {},
    "RandomErasing": {},
    "RandomFlip": {},
    "RandomGaussianBlur": {},
    "RandomGrayscale": {},
    "RandomHue": {"factor": 0.2},
    "RandomInvert": {},
    "RandomPerspective": {},
    "RandomPosterization": {"factor": 4},
    "RandomRotation": {"factor": 0.2},
    "RandomSaturation": {"factor": 0.2},
    "RandomSharpness": {"factor": 0.2},
    "RandomShear": {"x_factor": 0.2},
    "RandomTranslation": {"height_factor": 0.2, "width_factor": 0.2},
    "RandomZoom": {"height_factor": 0.2},
}
# The values are constructor arguments and input shapes.
_PLAIN: dict[str, tuple[dict[str, Any], Any]] = {
    "Activation": ({"activation": "softmax"}, _SEQUENCE),
    "ActivityRegularization": ({"l2": 0.1}, _SEQUENCE),
    "AlphaDropout": ({"rate": 0.2}, _SEQUENCE),
    "Conv1D": ({"filters": 16, "kernel_size": 3}, _SEQUENCE),
    "Conv1DTranspose": ({"filters": 8, "kernel_size": 3}, _SEQUENCE),
    "Conv2D": ({"filters": 16, "kernel_size": 3}, _MAP),
    "Conv2DTranspose": ({"filters": 8, "kernel_size": 3}, _MAP),
    "Conv3D": ({"filters": 8, "kernel_size": 3}, _VOLUME),
    "Conv3DTranspose": ({"filters": 4, "kernel_size": 3}, _VOLUME),
    "ConvLSTM1D": ({"filters": 4, "kernel_size": 3}, (2, 4, 8, 4)),
    "ConvLSTM2D": ({"filters": 4, "kernel_size": 3}, (2, 3, 8, 8, 4)),
    "ConvLSTM3D": ({"filters": 2, "kernel_size": 3}, (1, 2, 4, 4, 4, 2)),
    "Cropping1D": ({"cropping": 1}, _SEQUENCE),
    "Cropping2D": ({"cropping": 1}, _MAP),
    "Cropping3D": ({"cropping": 1}, _VOLUME),
    "Dense": ({"units": 32}, (16, 512)),
    "TernaryDense": ({"units": 32}, (16, 512)),
    "DepthwiseConv1D": ({"kernel_size": 3}, _SEQUENCE),
    "DepthwiseConv2D": ({"kernel_size": 3}, _MAP),
    "Dropout": ({"rate": 0.2}, _SEQUENCE),
    "ELU": ({}, _SEQUENCE),
    "EinsumDense": (
        {"equation": "abc,cd->abd", "output_shape": (None, 32)},
        _SEQUENCE,
    ),
    "Flatten": ({}, _MAP),
    "GRU": ({"units": 16}, (4, 12, 32)),
    "GaussianDropout": ({"rate": 0.2}, _SEQUENCE),
    "GaussianNoise": ({"stddev": 0.2}, _SEQUENCE),
    "GlobalAveragePooling1D": ({}, (2, 4096, 8)),
    "GlobalAveragePooling2D": ({}, (2, 64, 64, 8)),
    "GlobalAveragePooling3D": ({}, (2, 16, 16, 16, 4)),
    "GlobalMaxPooling1D": ({}, _SEQUENCE),
    "GlobalMaxPooling2D": ({}, _MAP),
    "GlobalMaxPooling3D": ({}, _VOLUME),
    "Identity": ({}, _SEQUENCE),
    "LSTM": ({"units": 16}, (4, 12, 32)),
    "LeakyReLU": ({}, _SEQUENCE),
    "Masking": ({}, _SEQUENCE),
    "MaxPooling1D": ({}, _SEQUENCE),
    "MaxPooling2D": ({}, _MAP),
    "MaxPooling3D": ({}, _VOLUME),
    "AdaptiveAveragePooling1D": ({"output_size": 2}, (2, 4096, 8)),
    "AdaptiveAveragePooling2D": ({"output_size": 2}, (2, 64, 64, 8)),
    "AdaptiveAveragePooling3D": ({"output_size": 2}, _VOLUME),
    "AdaptiveMaxPooling1D": ({"output_size": 2}, _SEQUENCE),
    "AdaptiveMaxPooling2D": ({"output_size": 2}, _MAP),
    "AdaptiveMaxPooling3D": ({"output_size": 2}, _VOLUME),
    "AveragePooling1D": ({"pool_size": 1024}, (2, 4096, 8)),
    "AveragePooling2D": ({"pool_size": 64}, (2, 64, 64, 8)),
    "AveragePooling3D": ({"pool_size": 8}, _VOLUME),
    "PReLU": ({}, _SEQUENCE),
    "Permute": ({"dims": (2, 1)}, _SEQUENCE),
    "RMSNormalization": ({}, (4, 1024)),
    "ReLU": ({}, _SEQUENCE),
    "RepeatVector": ({"n": 3}, (4, 64)),
    "Rescaling": ({"scale": 1 / 255.0}, _IMAGE),
    "Reshape": ({"target_shape": (-1,)}, _SEQUENCE),
    "Resizing": ({"height": 8, "width": 8}, _IMAGE),
    "CenterCrop": ({"height": 8, "width": 8}, _IMAGE),
    "AutoContrast": ({"value_range": (0, 255)}, _IMAGE),
    "ContrastLimitedAdaptiveHistogramEqualization": (
        {"value_range": (0, 255), "tile_grid_size": (2, 2)},
        _IMAGE,
    ),
    "Equalization": ({"value_range": (0, 255)}, _IMAGE),
    "Solarization": ({"value_range": (0, 255)}, _IMAGE),
    "MelSpectrogram": (
        {"fft_length": 256, "sequence_stride": 128, "num_mel_bins": 16},
        (2, 2048),
    ),
    "STFTSpectrogram": (
        {"frame_length": 128, "frame_step": 64, "fft_length": 128},
        (2, 1024, 1),
    ),
    "SeparableConv1D": ({"filters": 16, "kernel_size": 3}, _SEQUENCE),
    "SeparableConv2D": ({"filters": 16, "kernel_size": 3}, _MAP),
    "SimpleRNN": ({"units": 16}, (4, 12, 32)),
    "Softmax": ({}, (4, 1000)),
    "SpatialDropout1D": ({"rate": 0.2}, _SEQUENCE),
    "SpatialDropout2D": ({"rate": 0.2}, _MAP),
    "SpatialDropout3D": ({"rate": 0.2}, _VOLUME),
    "UnitNormalization": ({}, (4, 1024)),
    "UpSampling1D": ({}, _SEQUENCE),
    "UpSampling2D": ({"interpolation": "bilinear"}, _MAP),
    "UpSampling3D": ({}, (1, 4, 4, 4, 2)),
    "ZeroPadding1D": ({}, _SEQUENCE),
    "ZeroPadding2D": ({}, _MAP),
    "ZeroPadding3D": ({}, _VOLUME),
}
_IN_TRAINING: dict[str, tuple[dict[str, Any], Shape]] = {
    "BatchNormalization": ({}, (32, 16, 16, 8)),
    "GroupNormalization": ({"groups": 4}, _MAP),
    "LayerNormalization": ({}, (4, 32, 256)),
}
_MERGES = ("Add", "Concatenate", "Maximum", "Minimum", "Multiply", "Subtract")


def layer_recipes() -> dict[str, Recipe]:
    """Returns the recipes for all layers of the installed Keras."""
    found = {**_plain_recipes(), **_composite_recipes()}
    return {
        label: recipe
        for label, recipe in sorted(found.items())
        if hasattr(keras.layers, layer_name(label))
    }


def layer_name(label: str) -> str:
    """Returns the layer's name in `keras.layers` from a recipe's label."""
    return label.split("(")[0]


def activation_recipes() -> dict[str, Recipe]:
    """Returns a recipe for every activation of `keras.activations`."""
    names = [n for n in dir(keras.activations) if n[0].islower()]
    calls = {"threshold": {"threshold": 0.5, "default_value": 0.0}}
    return {
        name: Recipe(
            functools.partial(getattr, keras.activations, name),
            ((8, 500),),
            call=calls.get(name, {}),
        )
        for name in names
        if name not in ("deserialize", "get", "serialize")
    }


def _plain_recipes() -> dict[str, Recipe]:
    recipes = {
        name: Recipe(_maker(name, arguments), (shape,))
        for name, (arguments, shape) in _PLAIN.items()
    }
    for name, arguments in _RANDOM_IMAGE_LAYERS.items():
        make = _maker(name, arguments)
        recipes[name] = Recipe(make, (_IMAGE,), training=False)
    for name, (arguments, shape) in _IN_TRAINING.items():
        training = True if name == "BatchNormalization" else None
        recipes[name] = Recipe(_maker(name, arguments), (shape,), training)
    for name in _MERGES:
        pair = (_SEQUENCE, _SEQUENCE)
        recipes[name] = Recipe(_maker(name, {}), pair, as_list=True)
    return recipes


def _composite_recipes() -> dict[str, Recipe]:
    """Returns recipes that need several inputs, or other layers."""
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


def _maker(name: str, arguments: dict[str, Any]) -> Callable[[], Any]:
    return lambda: getattr(keras.layers, name)(**arguments)
