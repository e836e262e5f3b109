"""Gives users' gradient functions unscaled float32 gradients, under JAX.

The gradient of a `jax.custom_vjp` need not grow with what comes in: it may
clip, or take the sign. In a float16 model it computes in float32, as it would
without scaling. `jax.custom_gradient` and `keras.ops.custom_gradient` make a
`custom_vjp`, too.
"""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from tfmix._keras import context, custom_vjp
from tfmix.ops import tensors


def unscaled(original: Callable) -> Callable:
    """Returns the method that calls a `custom_vjp`; `original` is JAX's."""

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        gates = context.block.get().gates
        if gates is None or custom_vjp.is_linear(
            custom_vjp.users_function(self)
        ):
            return original(self, *args, **kwargs)
        # What it calls has no say in its gradient.
        with context.holding(gates=None):
            if not gates.reach():
                custom_vjp.say_scaled()
                return original(self, *args, **kwargs)
            bound = inspect.signature(self.fun).bind(*args, **kwargs)
            bound.apply_defaults()
            return _in_float32(
                functools.partial(original, self), bound.args, gates
            )

    return call


def _in_float32(function: Callable, args: tuple, gates: Any) -> Any:
    """Calls a function in float32; its result has the dtypes it would have."""
    shapes, form = jax.tree.flatten(jax.eval_shape(lambda: function(*args)))

    def of_floats(*floats: Any) -> list:
        return jax.tree.leaves(function(*_with(floats, args)))

    wide = map(tensors.to_float32, filter(_is_float, jax.tree.leaves(args)))
    found = gates.unscaled(of_floats, [*wide])
    narrow = [x.astype(y.dtype) for x, y in zip(found, shapes, strict=True)]
    return jax.tree.unflatten(form, narrow)


def _with(floats: Iterable, nest: Any) -> Any:
    """Returns a nest with other float arrays."""
    rest = iter(floats)
    return jax.tree.map(lambda x: next(rest) if _is_float(x) else x, nest)


def _is_float(leaf: Any) -> bool:
    is_array = isinstance(leaf, jax.Array | np.ndarray)
    return is_array and jnp.issubdtype(leaf.dtype, jnp.inexact)
