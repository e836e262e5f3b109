"""Linear maps with a transpose of their own, under JAX.

Like `custom_vjp`, but with forward mode (`jvp`, `linearize`), also inside a
compiled function. Like `linear_call`, but maps can be batched, and
differentiated by the values that they depend on.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras

if keras.backend.backend() == "jax":
    import jax
    import jax.extend
    from jax.interpreters import ad, batching, mlir


def apply(
    forward: Callable,
    transpose: Callable,
    differentiable: Callable,
    fixed: Sequence,
    vector: Sequence,
    like: Sequence,
) -> list:
    """Maps a vector linearly.

    Args:
        forward: Takes `*fixed, *vector`; returns a list of arrays.
        transpose: Takes `*fixed` and an array for each of `like`; returns a
            list with an array for each of `vector`.
        differentiable: Like `forward`; its derivatives are used.
        fixed: Arrays that the map depends on.
        vector: The float arrays to map.
        like: Arrays of the shapes and dtypes that `forward` returns.
    """
    mapped: list = _map.bind(
        *fixed,
        *vector,
        forward=forward,
        transpose=transpose,
        differentiable=differentiable,
        count=len(fixed),
        types=tuple(map(jax.typeof, like)),
    )
    return mapped


def _run(*values: Any, forward: Callable, **_: Any) -> list:
    mapped: list = forward(*values)
    return mapped


def _pushed(
    values: Sequence, tangents: Sequence, differentiable: Callable, **_: Any
) -> tuple[list, list]:
    tangents = list(map(ad.instantiate_zeros, tangents))
    mapped, pushed = jax.jvp(differentiable, tuple(values), tuple(tangents))
    return mapped, pushed


def _pulled(
    upstream: Sequence, *values: Any, transpose: Callable, count: int, **_: Any
) -> list:
    entering = map(ad.instantiate_zeros, upstream)
    leaving = transpose(*values[:count], *entering)
    wanted = map(ad.is_undefined_primal, values[count:])
    pairs = zip(leaving, wanted, strict=True)
    return [None] * count + [one if asked else None for one, asked in pairs]


def _batched(
    values: Sequence,
    axes: Sequence,
    forward: Callable,
    transpose: Callable,
    differentiable: Callable,
    count: int,
    types: Sequence,
) -> tuple[list, list]:
    sizes = [
        value.shape[axis]
        for value, axis in zip(values, axes, strict=True)
        if axis is not None
    ]
    size = sizes[0]
    # Each row gets its own vector, so that the transpose need not sum them.
    vector = [
        jax.numpy.broadcast_to(value, (size, *value.shape))
        if axis is None
        else jax.numpy.moveaxis(value, axis, 0)
        for value, axis in zip(values[count:], axes[count:], strict=True)
    ]
    fixed = tuple(axes[:count])
    by_row = fixed + (0,) * len(vector)
    mapped = _map.bind(
        *values[:count],
        *vector,
        forward=jax.vmap(forward, by_row),
        transpose=jax.vmap(transpose, fixed + (0,) * len(types)),
        differentiable=jax.vmap(differentiable, by_row),
        count=count,
        types=tuple(
            jax.extend.core.unmapped_aval(size, 0, kind) for kind in types
        ),
    )
    return mapped, [0] * len(types)


if keras.backend.backend() == "jax":
    _map = jax.extend.core.Primitive("tfmix_linear_map")
    _map.multiple_results = True
    _map.def_impl(_run)
    _map.def_abstract_eval(lambda *_, types, **__: list(types))
    mlir.register_lowering(_map, mlir.lower_fun(_run, multiple_results=True))
    ad.primitive_jvps[_map] = _pushed
    ad.primitive_transposes[_map] = _pulled
    batching.primitive_batchers[_map] = _batched
