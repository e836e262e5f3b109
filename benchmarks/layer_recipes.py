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
    "Input": "a function",
    "InputLayer": "computes nothing",
    "InputSpec": "no layer",
    "Lambda": "runs the user's function",
    "MaxNumBoundingBoxes": "pads bounding boxes, not tensors",
    "TFSMLayer": "wraps a SavedModel",
    **dict.fromkeys(("Layer", "Wrapper"), "a base class"),
    **dict.fromkeys(
        ("HashedCrossing", "Hashing", "IntegerLookup"), "takes integers"
    ),
    **dict.fromkeys(("StringLookup", "TextVectorization"), "takes strings"),
    **dict.fromkeys(
        ("FlaxLayer", "JaxLayer", "TorchModuleWrapper"), "wraps another library"
    ),
}

# Random layers are swept in inference, because the random numbers of two dtypes
# differ in training.
_SEQUENCE = (4, 32, 64)
_IMAGE = (2, 16, 16, 3)
_MAP = (2, 16, 16, 8)
_VOLUME = (2, 8, 8, 8, 4)
_IMAGE_LAYERS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        (
            *("AugMix", "CutMix", "MixUp", "Mosaic", "RandAugment"),
            *("RandomColorJitter", "RandomElasticTransform", "RandomErasing"),
            *("RandomFlip", "RandomGaussianBlur", "RandomGrayscale"),
            *("RandomInvert", "RandomPerspective"),
        ),
        {},
    ),
    **dict.fromkeys(
        (
            *("RandomBrightness", "RandomContrast", "RandomHue"),
            *("RandomRotation", "RandomSaturation", "RandomSharpness"),
        ),
        {"factor": 0.2},
    ),
    "RandomColorDegeneration": {"factor": 0.5},
    "RandomCrop": {"height": 8, "width": 8},
    "RandomPosterization": {"factor": 4},
    "RandomShear": {"x_factor": 0.2},
    "RandomTranslation": {"height_factor": 0.2, "width_factor": 0.2},
    "RandomZoom": {"height_factor": 0.2},
}
# Layers of one, two and three dimensions that have the same arguments.
_BY_RANK: dict[str, dict[str, Any]] = {
    "Cropping": {"cropping": 1},
    "GlobalMaxPooling": {},
    "MaxPooling": {},
    "AdaptiveMaxPooling": {"output_size": 2},
    "SpatialDropout": {"rate": 0.2},
    "ZeroPadding": {},
}
# The values are constructor arguments and input shapes.
_PLAIN: dict[str, tuple[dict[str, Any], Shape]] = {
    **{
        f"{family}{rank}D": (arguments, shape)
        for family, arguments in _BY_RANK.items()
        for rank, shape in enumerate((_SEQUENCE, _MAP, _VOLUME), 1)
    },
    **dict.fromkeys(
        ("ELU", "Identity", "LeakyReLU", "Masking", "PReLU", "ReLU"),
        ({}, _SEQUENCE),
    ),
    **dict.fromkeys(
        ("AlphaDropout", "Dropout", "GaussianDropout"),
        ({"rate": 0.2}, _SEQUENCE),
    ),
    **dict.fromkeys(("Dense", "TernaryDense"), ({"units": 32}, (16, 512))),
    **dict.fromkeys(("GRU", "LSTM", "SimpleRNN"), ({"units": 16}, (4, 12, 32))),
    **dict.fromkeys(("RMSNormalization", "UnitNormalization"), ({}, (4, 1024))),
    **dict.fromkeys(
        ("AutoContrast", "Equalization", "Solarization"),
        ({"value_range": (0, 255)}, _IMAGE),
    ),
    **dict.fromkeys(
        ("CenterCrop", "Resizing"), ({"height": 8, "width": 8}, _IMAGE)
    ),
    "Activation": ({"activation": "softmax"}, _SEQUENCE),
    "ActivityRegularization": ({"l2": 0.1}, _SEQUENCE),
    "Conv1D": ({"filters": 16, "kernel_size": 3}, _SEQUENCE),
    "Conv1DTranspose": ({"filters": 8, "kernel_size": 3}, _SEQUENCE),
    "Conv2D": ({"filters": 16, "kernel_size": 3}, _MAP),
    "Conv2DTranspose": ({"filters": 8, "kernel_size": 3}, _MAP),
    "Conv3D": ({"filters": 8, "kernel_size": 3}, _VOLUME),
    "Conv3DTranspose": ({"filters": 4, "kernel_size": 3}, _VOLUME),
    "ConvLSTM1D": ({"filters": 4, "kernel_size": 3}, (2, 4, 8, 4)),
    "ConvLSTM2D": ({"filters": 4, "kernel_size": 3}, (2, 3, 8, 8, 4)),
    "ConvLSTM3D": ({"filters": 2, "kernel_size": 3}, (1, 2, 4, 4, 4, 2)),
    "DepthwiseConv1D": ({"kernel_size": 3}, _SEQUENCE),
    "DepthwiseConv2D": ({"kernel_size": 3}, _MAP),
    "SeparableConv1D": ({"filters": 16, "kernel_size": 3}, _SEQUENCE),
    "SeparableConv2D": ({"filters": 16, "kernel_size": 3}, _MAP),
    "EinsumDense": (
        {"equation": "abc,cd->abd", "output_shape": (None, 32)},
        _SEQUENCE,
    ),
    "Flatten": ({}, _MAP),
    "GaussianNoise": ({"stddev": 0.2}, _SEQUENCE),
    "GroupNormalization": ({"groups": 4}, _MAP),
    "LayerNormalization": ({}, (4, 32, 256)),
    "GlobalAveragePooling1D": ({}, (2, 4096, 8)),
    "GlobalAveragePooling2D": ({}, (2, 64, 64, 8)),
    "GlobalAveragePooling3D": ({}, (2, 16, 16, 16, 4)),
    "AdaptiveAveragePooling1D": ({"output_size": 2}, (2, 4096, 8)),
    "AdaptiveAveragePooling2D": ({"output_size": 2}, (2, 64, 64, 8)),
    "AdaptiveAveragePooling3D": ({"output_size": 2}, _VOLUME),
    "AveragePooling1D": ({"pool_size": 1024}, (2, 4096, 8)),
    "AveragePooling2D": ({"pool_size": 64}, (2, 64, 64, 8)),
    "AveragePooling3D": ({"pool_size": 8}, _VOLUME),
    "Normalization": ({"mean": 100.0, "variance": 4.0}, (16, 32)),
    "Permute": ({"dims": (2, 1)}, _SEQUENCE),
    "RepeatVector": ({"n": 3}, (4, 64)),
    "Rescaling": ({"scale": 1 / 255.0}, _IMAGE),
    "Reshape": ({"target_shape": (-1,)}, _SEQUENCE),
    "ContrastLimitedAdaptiveHistogramEqualization": (
        {"value_range": (0, 255), "tile_grid_size": (2, 2)},
        _IMAGE,
    ),
    "MelSpectrogram": (
        {"fft_length": 256, "sequence_stride": 128, "num_mel_bins": 16},
        (2, 2048),
    ),
    "STFTSpectrogram": (
        {"frame_length": 128, "frame_step": 64, "fft_length": 128},
        (2, 1024, 1),
    ),
    "Softmax": ({}, (4, 1000)),
    "Softmax(axis=(1, 2))": ({"axis": (1, 2)}, (4, 32, 32)),
    "UpSampling1D": ({}, _SEQUENCE),
    "UpSampling2D": ({"interpolation": "bilinear"}, _MAP),
    "UpSampling3D": ({}, (1, 4, 4, 4, 2)),
}
# These take a list of inputs.
_MERGES: dict[str, tuple[dict[str, Any], tuple[Shape, ...]]] = {
    **dict.fromkeys(
        ("Add", "Concatenate", "Maximum", "Minimum", "Multiply", "Subtract"),
        ({}, (_SEQUENCE,) * 2),
    ),
    **dict.fromkeys(
        ("AdditiveAttention", "Attention"), ({}, ((2, 16, 32),) * 2)
    ),
    "Average": ({}, ((2, 32),) * 300),
    "Dot": ({"axes": 1}, ((4, 256),) * 2),
    "Dot(normalize=True)": ({"axes": 1, "normalize": True}, ((4, 1024),) * 2),
}


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
    return {
        **{
            label: Recipe(_maker(label, arguments), (shape,))
            for label, (arguments, shape) in _PLAIN.items()
        },
        **{
            label: Recipe(_maker(label, arguments), (_IMAGE,), training=False)
            for label, arguments in _IMAGE_LAYERS.items()
        },
        **{
            label: Recipe(_maker(label, arguments), shapes, as_list=True)
            for label, (arguments, shapes) in _MERGES.items()
        },
    }


def _composite_recipes() -> dict[str, Recipe]:
    """Returns recipes of layers that hold others, or have unusual inputs."""
    layers = keras.layers
    pair, series = ((2, 16, 32), (2, 16, 32)), ((4, 12, 32),)
    state = ((4, 32), (4, 16))
    found = {
        "BatchNormalization": Recipe(
            layers.BatchNormalization, ((32, 16, 16, 8),), training=True
        ),
        "Bidirectional": Recipe(
            lambda: layers.Bidirectional(layers.LSTM(8)), series
        ),
        "CategoryEncoding": Recipe(
            lambda: layers.CategoryEncoding(64, output_mode="count"),
            ((4, 12),),
            call={"ids": 64},
        ),
        "Embedding": Recipe(
            lambda: layers.Embedding(64, 16), ((4, 12),), call={"ids": 64}
        ),
        "GRUCell": Recipe(lambda: layers.GRUCell(16), state),
        "GlobalAveragePooling1D(mask)": Recipe(
            layers.GlobalAveragePooling1D,
            ((2, 4096, 8),),
            call={"mask": np.ones((2, 4096), bool)},
        ),
        "LSTMCell": Recipe(
            lambda: layers.LSTMCell(16), ((4, 32), ((4, 16), (4, 16)))
        ),
        "Pipeline": Recipe(
            lambda: layers.Pipeline(
                [layers.Rescaling(1 / 255.0), layers.CenterCrop(8, 8)]
            ),
            (_IMAGE,),
        ),
        "RNN": Recipe(lambda: layers.RNN(layers.GRUCell(16)), series),
        # It came with Keras 3.13.
        "ReversibleEmbedding": Recipe(
            lambda: layers.ReversibleEmbedding(64, 32),
            ((4, 32),),
            call={"reverse": True},
        ),
        "SimpleRNNCell": Recipe(lambda: layers.SimpleRNNCell(16), state),
        "SpectralNormalization": Recipe(
            lambda: layers.SpectralNormalization(layers.Dense(32)),
            ((16, 128),),
            training=False,
        ),
        "StackedRNNCells": Recipe(
            lambda: layers.RNN([layers.LSTMCell(8), layers.SimpleRNNCell(8)]),
            series,
        ),
        "TimeDistributed": Recipe(
            lambda: layers.TimeDistributed(layers.Dense(16)), ((4, 12, 64),)
        ),
    }
    for name, sizes in (
        ("GroupQueryAttention", (16, 4, 2)),
        ("MultiHeadAttention", (4, 16)),
    ):
        make = functools.partial(getattr(layers, name), *sizes)
        found[name] = Recipe(make, pair)
        dropout = functools.partial(make, dropout=0.1)
        found[f"{name}(dropout=0.1)"] = Recipe(dropout, pair)
    return found


def _maker(label: str, arguments: dict[str, Any]) -> Callable[[], Any]:
    name = layer_name(label)
    return lambda: getattr(keras.layers, name)(**arguments)
