"""Gives users' gradient functions unscaled float32 gradients, under JAX.

The gradient of a `jax.custom_vjp` need not grow with what comes in: it may
clip, or take the sign. In a float16 model it is computed outside of the scaled
part, so it gets what float32 would give it. `jax.custom_gradient` and
`keras.ops.custom_gradient` make a `custom_vjp`, too.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from tfmix import _formats
from tfmix._keras import context_values, custom_vjp

# Scaling changes nothing in the gradients of these packages' functions, which
# are linear in what comes in.
_LINEAR = {"jax", "keras", "tfmix"}


def unscaled(original: Callable) -> Callable:
    """Returns the method that calls a `custom_vjp`; `original` is JAX's."""

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        outside = context_values.block.get().outside
        rule = custom_vjp.with_rule(self)
        function = rule or self.fun
        is_linear = (function.__module__ or "").partition(".")[0] in _LINEAR
        if outside is None or is_linear:
            return original(self, *args, **kwargs)
        bound = inspect.signature(self.fun).bind(*args, **kwargs)
        bound.apply_defaults()
        with context_values.holding(outside=None):
            part = _Part(functools.partial(original, self), bound.args)
        (result,) = outside(part.computed, part.arrays)
        return result

    return call


class _Part:
    """One call of a user's function.

    It computes in float32, as its gradient does. JAX may differentiate its
    forward pass, too, for a derivative of the gradient.

    Attributes:
        arrays: The arrays among its arguments.
    """

    def __init__(self, function: Callable, args: Sequence) -> None:
        self._function, self._args = function, args
        shapes = jax.eval_shape(lambda: function(*args))
        self._dtypes = [
            x.dtype for x in jax.tree.leaves(shapes) if _is_float(x)
        ]
        self.arrays = list(filter(_is_array, jax.tree.leaves(args)))

    def computed(self, arrays: Sequence) -> tuple[list, Callable]:
        """Computes the function of other arrays, in float32.

        Args:
            arrays: Take the place of its own.

        Returns:
            The float arrays of its result, and a function that takes these and
            returns the result in its own dtypes, in a list.
        """
        args = _with(_is_array, self._args, map(_wide, arrays))
        with context_values.holding(outside=None):
            result = jax.tree.map(_wide, self._function(*args))

        def rebuilt(floats: Sequence) -> list:
            pairs = zip(floats, self._dtypes, strict=True)
            narrow = [x.astype(dtype) for x, dtype in pairs]
            return [_with(_is_float, result, narrow)]

        return list(filter(_is_float, jax.tree.leaves(result))), rebuilt


def _with(which: Callable[[Any], bool], nest: Any, new: Iterable) -> Any:
    """Returns a nest with others in place of some leaves."""
    rest = iter(new)
    return jax.tree.map(lambda x: next(rest) if which(x) else x, nest)


def _wide(leaf: Any) -> Any:
    narrow = _is_float(leaf) and leaf.dtype.name in _formats.SIXTEEN_BIT
    return leaf.astype("float32") if narrow else leaf


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray)


def _is_float(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)
