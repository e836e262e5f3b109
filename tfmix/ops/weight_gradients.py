"""Forms the gradients of float32 weights in float32.

Keras casts a float32 variable when a 16-bit layer reads it. A product, a sum or
a lookup with that copy would form the variable's gradient in 16 bit, where the
sum over rows, pixels, time steps or tokens overflows or loses digits. Here each
copy knows its float32 source, and Keras's operations return the gradient to
that source in float32.
"""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import keras

from tfmix import _formats
from tfmix._keras import (
    compilation,
    context_values,
    global_state,
    gradients,
    layer_policies,
    layers,
    replacements,
)
from tfmix.ops import contraction, float32_values, tensors

products: Any
if keras.backend.backend() == "tensorflow":
    from tfmix.ops import tensorflow_products

    products = tensorflow_products
else:
    from tfmix.ops import jax_products

    products = jax_products

# A 16-bit copy of a weight carries this note: its float32 source.
SOURCE = "_tfmix_weight"
# A variable and its copy carry this: the function that multiplies by it.
_CHOSEN = "_tfmix_chosen_product"
# Operations on one argument. If that is a weight's copy, so is the result.
_ALONE = (
    *("transpose", "reshape", "split", "squeeze", "expand_dims"),
    *("moveaxis", "swapaxes", "broadcast_to", "tile", "repeat", "flip"),
    *("pad", "roll", "tril", "triu", "diag"),
    *("concatenate", "stack", "negative", "abs", "absolute", "clip"),
    *("relu", "sigmoid", "tanh"),
)
# Operations that always compute in float32, so they can take float32.
_WIDE = ("layer_normalization", "rms_normalization")
_CONVOLUTIONS = ("conv", "depthwise_conv", "conv_transpose")
# The sum of so few terms is exact to some units of a 16-bit last place.
_FEW = 64

Maker = Callable[[Callable], Callable]
# Takes a 16-bit tensor, the float32 weight and the contraction; returns the
# product in the dtype of the tensor, or `None` if it does not support that.
Multiply = Callable[[Any, Any, contraction.Contraction], Any]


def choose(variable: keras.Variable, multiply: Multiply | None) -> None:
    """Sets the function that computes products with this variable.

    `None` removes it.
    """
    layer_policies.put(variable, _CHOSEN, multiply)


def source(tensor: Any) -> Any:
    """Returns the float32 weight behind a 16-bit copy, `None` without one.

    A variable is read first, as the calling layer reads it.
    """
    # Nearly all tensors have no note, and a look at the dtype takes longer.
    weight = global_state.note(tensor, SOURCE)
    if weight is None or isinstance(tensor, keras.KerasTensor):
        return None
    return weight if tensors.is_16_bit(tensor) else None


def exact(value: Any, known: float32_values.Known | None = None) -> Any:
    """Returns a 16-bit tensor or variable in float32, as exact as is known.

    Anything else is returned unchanged.
    """
    value = tensors.snapshot(value)
    if not tensors.is_16_bit(value):
        return value
    found = source(value)
    if found is None:
        found = float32_values.of(value, known)
    return tensors.widen(value) if found is None else found


def is_exact(value: Any) -> bool:
    """Returns whether the float32 value behind a 16-bit tensor is exact.

    It is if it comes from a variable, or was made only of such values and sums.
    """
    if source(value) is not None:
        return True
    notes = float32_values.find([value])
    return bool(notes) and notes[0].is_exact


def _copy(weight: Any, dtype: Any) -> Any:
    """Returns a 16-bit copy of a float32 weight."""
    copy = keras.ops.cast(weight, dtype)
    global_state.put_note(copy, SOURCE, weight)
    return copy


def _autocast(original: Callable) -> Callable:
    """Returns the function that casts variables for 16-bit layers."""

    def maybe_cast(self: Any, value: Any) -> Any:
        casts = layers.casts_to_16_bit(self)
        # Copies of symbols get no notes, so that ops leave them to Keras.
        if not casts or global_state.on_shapes_only():
            return original(self, value)
        # The variable is read once, as the tensor that is then copied.
        weight = compilation.read(value)
        copy = original(self, weight)
        global_state.put_note(copy, SOURCE, weight)
        chosen = getattr(self, _CHOSEN, None)
        if chosen is not None:
            global_state.put_note(copy, _CHOSEN, chosen)
        return copy

    return maybe_cast


def _loop(original: Callable) -> Callable:
    def inner_loop(*args: Any, **kwargs: Any) -> Any:
        with context_values.holding(in_loop=True):
            return original(*args, **kwargs)

    return inner_loop


def _cast(original: Callable) -> Callable:
    """Makes a cast back to float32 return the value before rounding."""

    def cast(x: Any, dtype: Any) -> Any:
        x = tensors.snapshot(x)
        weight = source(x)
        dtype = keras.backend.standardize_dtype(dtype)
        if dtype == "float32":
            if weight is not None:
                return weight
            if any(note.is_lost for note in float32_values.find([x])):
                return float32_values.of(x)
        result = original(x, dtype)
        if weight is not None and dtype in _formats.SIXTEEN_BIT:
            global_state.put_note(result, SOURCE, weight)
        return result

    return cast


def _adapted(original: Callable) -> Callable:
    """Computes a kernel with LoRA in float32, and casts the sum."""

    def kernel(self: Any) -> Any:
        narrow = self.compute_dtype in _formats.SIXTEEN_BIT
        if not narrow or not self.lora_enabled or self.quantization_mode:
            return original(self)
        copy = _copy(layers.adapted_kernel(self), self.compute_dtype)
        chosen = getattr(layers.kernel_of(self), _CHOSEN, None)
        global_state.put_note(copy, _CHOSEN, chosen)
        return copy

    return kernel


def _prelu(original: Callable) -> Callable:
    """Computes PReLU, which multiplies without a Keras op."""
    del original

    def call(self: Any, inputs: Any) -> Any:
        ops = keras.ops
        slope = ops.negative(self.alpha)
        below = ops.multiply(slope, ops.relu(ops.negative(inputs)))
        return ops.add(ops.relu(inputs), below)

    return call


def _item(original: Callable) -> Callable:
    def item(self: Any, index: Any) -> Any:
        copy = self.value
        weight = source(copy)
        if weight is None:
            return original(self, index)
        return _copy(weight[index], copy.dtype)

    return item


def _alone(original: Callable) -> Callable:
    def alone(x: Any, *args: Any, **kwargs: Any) -> Any:
        several = isinstance(x, list | tuple)
        copies = [tensors.snapshot(one) for one in (x if several else [x])]
        weights = [source(one) for one in copies]
        if not weights or any(weight is None for weight in weights):
            return original(x if several else copies[0], *args, **kwargs)
        exact = weights if several else weights[0]
        result = original(exact, *args, **kwargs)
        copy = functools.partial(_copy, dtype=copies[0].dtype)
        return tensors.map_leaves(result, copy)

    return alone


def _wide(original: Callable) -> Callable:
    def wide(*args: Any, **kwargs: Any) -> Any:
        def exact(x: Any) -> Any:
            x = tensors.snapshot(x)
            weight = source(x)
            return x if weight is None else weight

        args, kwargs = tensors.map_leaves((args, kwargs), exact)
        return original(*args, **kwargs)

    return wide


def _take(original: Callable) -> Callable:
    def take(x: Any, indices: Any, axis: Any = None) -> Any:
        # A snapshot would read all rows; TensorFlow reads only those needed.
        x = x.value if isinstance(x, keras.Variable) else x
        weight = source(x)
        if weight is None:
            return original(x, indices, axis=axis)
        rows = original(weight, indices, axis=axis)
        return keras.ops.cast(rows, x.dtype)

    return take


def _factors(x1: Any, x2: Any) -> tuple[Any, Any, int | None]:
    """Returns two factors as they are used, and the index of a weight's copy.

    The index is `None` if there is none, 2 if both are copies.

    Args:
        x1: The first factor, a snapshot.
        x2: The second.
    """
    found = [n for n, x in enumerate((x1, x2)) if source(x) is not None]
    if not found:
        return x1, x2, None
    if len(found) == 2:
        return x1, x2, 2
    dtypes = [tensors.float_dtype(x) for x in (x1, x2)]
    if "float32" in dtypes:
        # The product uses the float32 weight.
        return exact(x1), exact(x2), None
    if dtypes[0] != dtypes[1] or dtypes[0] not in _formats.SIXTEEN_BIT:
        return x1, x2, None
    return x1, x2, found[0]


def _by_weight(original: Callable, compute: Callable, x1: Any, x2: Any) -> Any:
    """Applies an op to two factors, by `compute` if one is a weight's copy.

    The result for two copies is a copy.

    Args:
        original: Computes the result from both factors.
        compute: Takes a function of inputs and weight, both of these, and the
            weight's index; returns the result, or `None` if it cannot.
        x1: The first factor, a snapshot.
        x2: The second.
    """
    x1, x2, place = _factors(x1, x2)
    if place is None:
        return original(x1, x2)
    if place == 2:
        return _copy(original(source(x1), source(x2)), x1.dtype)
    inputs, weight = (x1, source(x2)) if place else (x2, source(x1))

    def function(inputs: Any, weight: Any) -> Any:
        return original(*((inputs, weight) if place else (weight, inputs)))

    result = compute(function, inputs, weight, place)
    return original(x1, x2) if result is None else result


def _multiplied(original: Callable, sums: Callable, x1: Any, x2: Any) -> Any:
    """Multiplies two factors; for a weight, with its chosen function.

    Args:
        original: Computes the product of both factors.
        sums: Takes the shapes of both factors and the weight's index; returns
            the contraction.
        x1: The first factor.
        x2: The second.
    """
    x1, x2 = tensors.snapshot(x1), tensors.snapshot(x2)

    def compute(function: Any, inputs: Any, weight: Any, place: int) -> Any:
        own = global_state.note((x1, x2)[place], _CHOSEN)
        is_asked = gradients.may_be_asked()
        if own is None and not is_asked:
            return None
        shapes = [weight.shape, weight.shape]
        shapes[1 - place] = inputs.shape
        axes = sums(shapes, place)
        if axes is None:
            return None
        result = own and own(inputs, weight, axes)
        if result is not None or not is_asked:
            return result
        in_loop = context_values.block.get().in_loop
        return products.contracted(
            function, inputs, weight, axes, in_loop=in_loop
        )

    return _by_weight(original, compute, x1, x2)


def _matmul(original: Callable) -> Callable:
    def sums(shapes: list, place: int) -> Any:
        if not _has_same_stack(*shapes):
            return None
        return contraction.of_matmul(list(map(len, shapes)), place)

    def matmul(x1: Any, x2: Any) -> Any:
        return _multiplied(original, sums, x1, x2)

    return matmul


def _dot(original: Callable) -> Callable:
    def sums(shapes: list, place: int) -> Any:
        return contraction.of_dot(list(map(len, shapes)), place)

    def dot(x1: Any, x2: Any) -> Any:
        return _multiplied(original, sums, x1, x2)

    return dot


def _has_same_stack(first: Any, second: Any) -> bool:
    """Returns whether stacks of matrices need not be repeated."""
    ranks = len(first), len(second)
    return min(ranks) < 3 or tuple(first)[:-2] == tuple(second)[:-2]


def _tensordot(original: Callable) -> Callable:
    def tensordot(x1: Any, x2: Any, axes: Any = 2) -> Any:
        def sums(shapes: list, place: int) -> Any:
            return contraction.of_tensordot(list(map(len, shapes)), axes, place)

        function = functools.partial(original, axes=axes)
        return _multiplied(function, sums, x1, x2)

    return tensordot


def _einsum(original: Callable) -> Callable:
    def einsum(subscripts: str, *operands: Any, **kwargs: Any) -> Any:
        def sums(shapes: list, place: int) -> Any:
            ranks = list(map(len, shapes))
            return contraction.of_einsum(subscripts, ranks, place)

        function = functools.partial(original, subscripts, **kwargs)
        if len(operands) != 2:
            return function(*operands)
        return _multiplied(function, sums, *operands)

    return einsum


def _separable(original: Callable) -> Callable:
    """Computes a separable convolution as two convolutions."""
    signature = inspect.signature(original)

    def separable(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = dict(bound.arguments)
        kernel = tensors.snapshot(given.pop("depthwise_kernel"))
        pointwise = tensors.snapshot(given.pop("pointwise_kernel"))
        if source(kernel) is None and source(pointwise) is None:
            return original(*args, **kwargs)
        inner = keras.ops.depthwise_conv(kernel=kernel, **given)
        return keras.ops.conv(
            inner, pointwise, data_format=given["data_format"]
        )

    return separable


def _elementwise(
    original: Callable, signs: tuple[int, int] | None = None
) -> Callable:
    """Adds two factors, each by its sign, or multiplies them."""

    def compute(function: Any, inputs: Any, weight: Any, place: int) -> Any:
        if not gradients.may_be_asked():
            return None
        return products.combined(
            function,
            inputs,
            weight,
            signs=signs and (signs[1 - place], signs[place]),
            in_loop=context_values.block.get().in_loop,
        )

    def elementwise(x1: Any, x2: Any) -> Any:
        x1, x2 = tensors.snapshot(x1), tensors.snapshot(x2)
        if isinstance(x2, int | float):
            return _alone(lambda x: original(x, x2))(x1)
        if isinstance(x1, int | float):
            return _alone(lambda x: original(x1, x))(x2)
        place = None if signs is None else _often_repeated(x1, x2)
        if place is None:
            return _by_weight(original, compute, x1, x2)
        # JAX would sum the gradient of a 16-bit bias in 16 bit.
        pair = [x1, x2]
        pair[place] = _copy(keras.ops.cast(pair[place], "float32"), x1.dtype)
        return _by_weight(original, compute, *pair)

    return elementwise


def _often_repeated(x1: Any, x2: Any) -> int | None:
    """Returns which of two 16-bit tensors is a bias for many rows (JAX)."""
    if keras.backend.backend() != "jax":
        return None
    if source(x1) is not None or source(x2) is not None:
        return None
    if not (tensors.is_16_bit(x1) and tensors.is_16_bit(x2)):
        return None
    sizes = [math.prod(x.shape) for x in (x1, x2)]
    # A program for any batch size has sizes that are no numbers.
    numbers = all(isinstance(size, int) for size in sizes)
    if not numbers or max(sizes) <= _FEW * min(sizes):
        return None
    return sizes.index(min(sizes))


def _convolution(original: Callable) -> Callable:
    signature = inspect.signature(original)

    def convolution(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        factors = map(tensors.snapshot, (given["inputs"], given["kernel"]))
        inputs, kernel, place = _factors(*factors)
        if place != 1 or not gradients.may_be_asked():
            given |= {"inputs": inputs, "kernel": kernel}
            return original(*bound.args, **bound.kwargs)

        def function(inputs: Any, kernel: Any) -> Any:
            return original(**{**given, "inputs": inputs, "kernel": kernel})

        weight = source(kernel)
        last = _channels_last(given["data_format"])
        is_transposed = "output_padding" in given
        if not is_transposed and _is_pointwise(original, inputs, weight, last):
            return _pointwise(function, inputs, weight, given["strides"], last)

        def positions(inputs: Any, outputs: Any) -> Any:
            # A filter is multiplied once for each of these positions.
            shape = list(inputs if is_transposed else outputs)
            shape.pop(-1 if last else 1)
            return math.prod(shape)

        return products.convolved(function, inputs, weight, positions)

    return convolution


def _channels_last(data_format: str | None) -> bool:
    wanted = data_format or keras.config.image_data_format()
    return wanted.lower() == "channels_last"


def _is_pointwise(
    original: Callable, inputs: Any, weight: Any, last: bool
) -> bool:
    """Returns whether a convolution is a product of matrices."""
    channels = inputs.shape[-1 if last else 1]
    return (
        original.__name__ == "conv"
        and all(size == 1 for size in weight.shape[:-2])
        and channels == weight.shape[-2]
    )


def _pointwise(
    function: Callable, inputs: Any, weight: Any, strides: Any, last: bool
) -> Any:
    rank = len(inputs.shape) - 2
    kernel_shape = tuple(weight.shape)
    strides = (strides,) * rank if isinstance(strides, int) else tuple(strides)
    steps = tuple(slice(None, None, stride) for stride in strides)

    def used(inputs: Any) -> Any:
        if last:
            return inputs[(slice(None), *steps)]
        return inputs[(slice(None), slice(None), *steps)]

    spatial = "abc"[:rank]
    letters = [f"n{spatial}i", f"n{spatial}o"]
    if not last:
        letters = [f"ni{spatial}", f"no{spatial}"]
    axes = contraction.Contraction(letters[0], "io", letters[1])
    return products.contracted(
        lambda x, w: function(x, keras.ops.reshape(w, kernel_shape)),
        inputs,
        keras.ops.reshape(weight, kernel_shape[-2:]),
        axes,
        **({"used": used} if any(stride > 1 for stride in strides) else {}),
    )


def _alike(make: Maker) -> Maker:
    """Returns what makes a stand-in of the original's name and signature."""
    return lambda original: functools.wraps(original)(make(original))


_OF_OPS: dict[str, Maker] = {
    "matmul": _matmul,
    "dot": _dot,
    "tensordot": _tensordot,
    "einsum": _einsum,
    "add": functools.partial(_elementwise, signs=(1, 1)),
    "subtract": functools.partial(_elementwise, signs=(1, -1)),
    "multiply": _elementwise,
    "take": _take,
    "cast": _cast,
    **dict.fromkeys(_CONVOLUTIONS, _convolution),
    "separable_conv": _separable,
    **dict.fromkeys(_ALONE, _alone),
    **dict.fromkeys(_WIDE, _wide),
}
_OF_METHODS: dict[replacements.Place, Maker] = {
    layers.AUTOCAST: _autocast,
    layers.ITEM: _item,
    layers.PRELU: _prelu,
    layers.LOOP: _loop,
    **dict.fromkeys(layers.ADAPTED_KERNELS, _adapted),
}
# Makers of replacements: of Keras's ops, by their names, and of its methods.
OPS = {name: _alike(make) for name, make in _OF_OPS.items()}
METHODS = {place: _alike(make) for place, make in _OF_METHODS.items()}
