"""Layer rules: which layers a 16-bit policy leaves in float32, and why."""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable
from typing import Any

import keras

RuleItem = str | type


_ATTENTION = "unscaled logits leave float16's range: every output is NaN"
_ADDITIVE = "saturated scores: the gradient of its scale is rounding noise"
_AVERAGED = "the sum overflows before it is divided"
_WIDE_AVERAGE = "averages many values; kept with the other averages"
_NORMALISED = "the sum of squares leaves float16's range: zeros"
_RAW = "raw features lose their digits in 16 bit"
_SOFTMAX = "probabilities lose their small values"
_SPECTRUM = "infinite in float16, a TypeError in bfloat16"

# The names of classes that stay in float32, with the reasons for reports.
# `benchmarks/layers.py` measured these on Keras 3.12 to 3.15. The global
# averages over images and volumes complete their family, although Keras sums
# them in float32 by itself. Op rules cover some of these layers as well, but
# only a layer's dtype is saved with a model that plain Keras loads.
DEFAULT_LAYERS: dict[RuleItem, str] = {
    "Softmax": _SOFTMAX,
    "Attention": _ATTENTION,
    "AdditiveAttention": _ADDITIVE,
    "UnitNormalization": _NORMALISED,
    "Average": _AVERAGED,
    "GlobalAveragePooling1D": _AVERAGED,
    "GlobalAveragePooling2D": _WIDE_AVERAGE,
    "GlobalAveragePooling3D": _WIDE_AVERAGE,
    "AveragePooling1D": _AVERAGED,
    "AveragePooling2D": _AVERAGED,
    "AveragePooling3D": _AVERAGED,
    "STFTSpectrogram": _SPECTRUM,
    # All preprocessing layers derive from this class, which is `DataLayer` in
    # Keras 3.15 and `TFDataLayer` in 3.12.
    "DataLayer": _RAW,
    "TFDataLayer": _RAW,
}
_KEPT_BY_LEVELS: dict[RuleItem, str] = {
    "BatchNormalization": "its moving statistics need small updates",
    **DEFAULT_LAYERS,
}
# The reason why each layer of tfmix's own rules stays in float32.
REASONS: dict[RuleItem, str] = {
    "LayerNormalization": "on the black list of level O2",
    **_KEPT_BY_LEVELS,
    # No list leaves it out: 16 bit is no choice here.
    "TFSMLayer": "a SavedModel has dtypes of its own",
}
# TensorFlow 2.21 cannot run these in float16 without an accelerator.
NO_CPU_KERNELS = dict.fromkeys(
    ("MaxPooling3D", "AdaptiveMaxPooling3D"),
    "TensorFlow has no float16 kernel for it on a CPU",
)

# This is MindSpore's AMP_WHITE_LIST (`train/amp.py`) in Keras's names, with
# the attention layers that scale their logits.
MATMUL_LAYERS: tuple[str, ...] = (
    *("Dense", "EinsumDense", "BaseConv", "BaseConvTranspose"),
    *("BaseDepthwiseConv", "BaseSeparableConv", "LSTMCell", "GRUCell"),
    *("SimpleRNNCell", "RNN", "MultiHeadAttention", "GroupedQueryAttention"),
    *("PReLU", "ReLU"),
)


@dataclasses.dataclass(frozen=True)
class Level:
    """One of Apex's and MindSpore's levels, in tfmix's terms."""

    policy: str
    layers: tuple[RuleItem, ...] = ()
    op_rules: bool = False  # true if the default op rules are active


LEVELS: dict[str, Level] = {
    # Everything in float32: Apex's and MindSpore's baseline.
    "O0": Level("float32"),
    # Only layers on the white list compute in 16 bit. The loss is scaled, as
    # in Apex; MindSpore leaves that to its user.
    "O1": Level("mixed_float16", tuple(_KEPT_BY_LEVELS), True),
    # Everything but the black list computes in 16 bit. On it are batch and
    # layer normalisation, and the layers that tfmix measured.
    "O2": Level(
        "mixed_float16", ("LayerNormalization", *_KEPT_BY_LEVELS), True
    ),
    # Everything is in 16 bit, variables included. It shows the highest speed,
    # but is not meant for training.
    "O3": Level("float16"),
}


def default_float32_layers(*, add: Iterable[RuleItem] = ()) -> list[RuleItem]:
    """Returns the default rules, extended, as a fresh list.

    Use it to write a policy's own list:
    `Policy(name, float32_layers=Policy.default_float32_layers(add=[...]))`.

    Args:
        add: Items to append: layer classes, class names, or regular
            expressions. Defaults to none.

    Returns:
        A list of rule items; changing it changes nothing else.

    Examples:
        >>> "Softmax" in default_float32_layers()
        True
    """
    return list(resolve([*DEFAULT_LAYERS, *add]))


def resolve(
    items: Iterable[RuleItem], argument: str = "float32_layers"
) -> tuple[RuleItem, ...]:
    """Checks a list of layer rules and returns it as a tuple."""
    check = functools.partial(_check, argument=argument)
    return checked(argument, items, check, "['Softmax', 'head.*']")


def checked(
    argument: str, items: Any, check: Callable[[Any], None], example: str
) -> tuple[Any, ...]:
    """Checks the items of a list, and leaves out repetitions."""
    if isinstance(items, str | type) or not isinstance(items, Iterable):
        raise TypeError(
            f"`{argument}` must be a list, for example {example}. "
            f"Received: {argument}={items!r}."
        )
    every = list(items)
    for item in every:
        check(item)
    return tuple(dict.fromkeys(every))


def matches(
    item: RuleItem, layer_class: type, name: str, path: str | None = None
) -> bool:
    """Returns whether a rule covers a layer; `path` is `None` if unknown yet.

    A class covers its subclasses. A string is the name of a class or of one
    of its bases, or a regular expression that must match the layer's whole
    name or path.
    """
    if isinstance(item, type):
        return issubclass(layer_class, item)
    if any(base.__name__ == item for base in layer_class.__mro__):
        return True
    # The class behind `keras.layers.GroupQueryAttention` has another name.
    exported = getattr(keras.layers, item, None)
    if isinstance(exported, type) and issubclass(layer_class, exported):
        return True
    places = (name,) if path is None else (name, path)
    return any(re.fullmatch(item, place) for place in places)


def needs_path(items: Iterable[RuleItem]) -> bool:
    """Returns whether any item could match a path that is not just a name."""
    return any(
        isinstance(item, str) and not item.isidentifier() for item in items
    )


def _check(item: object, argument: str) -> None:
    if isinstance(item, type):
        if not issubclass(item, keras.Layer):
            raise TypeError(
                f"A class in `{argument}` must be a Keras layer. "
                f"Received: {item!r}."
            )
        return
    if not isinstance(item, str):
        raise TypeError(
            f"`{argument}` takes layer classes, class names and regular "
            f"expressions. Received: {item!r} of type {type(item).__name__}."
            + (" Name its class or its name." * isinstance(item, keras.Layer))
        )
    try:
        re.compile(item)
    except re.error as error:
        raise ValueError(
            f"A string in `{argument}` must be a class name or a regular "
            f"expression. Received: {item!r}, which is neither: {error}."
        ) from error
