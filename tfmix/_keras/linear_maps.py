"""Defines linear maps whose transpose is a given function, under JAX.

Such a map is like a `custom_vjp`, but has forward mode (`jvp`, `linearize`),
also inside a compiled function. It is like a `linear_call`, but can be
batched, and differentiated by the values that it depends on.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras

if keras.backend.backend() == "jax":
    import jax
    import jax.extend
    from jax.interpreters import ad, batching, mlir


def apply(
    forward: Callable[[Any, list], Any],
    transpose: Callable[[Any, Any], list],
    fixed: Any,
    vector: Sequence,
    like: Any,
) -> Any:
    """Maps a vector linearly.

    Args:
        forward: Takes `fixed` and `vector`; returns a nest like `like`. Its
            derivatives are used.
        transpose: Takes `fixed` and a nest like `like`; returns a list with an
            array for each of `vector`.
        fixed: A nest of arrays that the map depends on.
        vector: The float arrays to map.
        like: A nest of arrays of the shapes and dtypes that `forward` returns.
    """
    saved, structure = jax.tree.flatten(fixed)
    leaves, nest = jax.tree.flatten(like)
    count = len(saved)

    def mapped(*given: Any) -> list:
        fixed = structure.unflatten(given[:count])
        return jax.tree.leaves(forward(fixed, list(given[count:])))

    def transposed(*given: Any) -> list:
        fixed = structure.unflatten(given[:count])
        return transpose(fixed, nest.unflatten(given[count:]))

    results = _map.bind(
        *saved,
        *vector,
        forward=mapped,
        transpose=transposed,
        count=count,
        types=tuple(map(jax.typeof, leaves)),
    )
    return nest.unflatten(results)


def _run(*values: Any, forward: Callable, **_: Any) -> list:
    mapped: list = forward(*values)
    return mapped


def _pushed(
    values: Sequence, tangents: Sequence, forward: Callable, **_: Any
) -> tuple[list, list]:
    tangents = list(map(ad.instantiate_zeros, tangents))
    mapped, pushed = jax.jvp(forward, tuple(values), tuple(tangents))
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
    mapped = _map.bind(
        *values[:count],
        *vector,
        forward=jax.vmap(forward, fixed + (0,) * len(vector)),
        transpose=jax.vmap(transpose, fixed + (0,) * len(types)),
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
