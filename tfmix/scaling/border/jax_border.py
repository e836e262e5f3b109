"""A border around a function, under JAX."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.interpreters import ad

from tfmix.scaling.border import power
from tfmix.scaling.products import jax_products

# A function with a border: of arrays, two lists of float arrays, and others.
Results = tuple[list, list, Any]
Function = Callable[..., Results]


def call(function: Function, values: Sequence) -> Results:
    """Calls a function whose gradient is scaled inside and true outside.

    What enters backwards is brought to order one by a power of two that is
    found anew in each backward pass, and divided out where gradients leave.
    Its own gradient has such a border as well; it runs the function again,
    once for each order.

    Args:
        function: Takes arrays; returns results, losses that were added on the
            way, whose gradients are often far larger, and a nest of others
            that no gradient passes through.
        values: All arrays it depends on. Those of float dtypes get gradients.

    Returns:
        What the function returns.
    """
    # Of NumPy's, JAX makes constants that it does not take back.
    values = jax_products.varying_alike(map(jnp.asarray, values))
    if _in_forward_mode(values):
        return _pushed(function, values)
    # Who differentiates does so at the border alone.
    fixed = lax.stop_gradient(values)
    results, pull, others = jax.vjp(
        _of_floats(function, fixed), *_floats(fixed), has_aux=True
    )
    results, losses = _known(
        results,
        (pull, power.placing(), values),
        again=lambda saved: call(function, saved[-1])[:2],
        gradients=functools.partial(_gradients, function),
    )
    return results, losses, others


def _in_forward_mode(values: Iterable) -> bool:
    """Says whether `jax.jvp` is at work, which refuses a `custom_vjp`."""
    # Before 0.7, JAX pulls gradients back with tracers of the same kind.
    has_own_tracers = getattr(jax.config, "jax_use_direct_linearize", True)
    return has_own_tracers and any(
        isinstance(value, ad.JVPTracer) for value in values
    )


def _pushed(function: Function, values: tuple) -> Results:
    """Calls a function and pushes tangents through it, inside one border."""
    count = len(values)

    def both(*given: Any) -> Results:
        values, tangents = given[:count], list(given[count:])
        kept, pushed, others = jax.jvp(
            _of_floats(function, values),
            _floats(values),
            tangents,
            has_aux=True,
        )
        results, losses = map(jax.tree.leaves, zip(kept, pushed, strict=True))
        return results, losses, others

    @jax.custom_jvp
    def known(*values: Any) -> Results:
        return call(function, values)

    @known.defjvp
    def _(values: tuple, tangents: tuple) -> tuple[Results, Results]:
        results, losses, others = call(both, (*values, *_floats(tangents)))
        half, added = len(results) // 2, len(losses) // 2
        still = jax.tree.map(_no_tangent, others)
        return (
            (results[:half], losses[:added], others),
            (results[half:], losses[added:], still),
        )

    same_results: Results = known(*values)
    return same_results


def _no_tangent(value: Any) -> Any:
    if _is_float(value):
        return jnp.zeros_like(value)
    return np.zeros(value.shape, jax.dtypes.float0)


def _known(
    results: Any, saved: Any, again: Callable, gradients: Callable
) -> Any:
    """Returns results, whose gradients a function of one's own finds.

    What they were made of beside `saved`, as what a function closes over, is
    beyond the border: it gets true gradients that nothing scales.

    Args:
        results: A nest of arrays.
        saved: A nest of the arrays that get gradients, and of others.
        again: Makes the results of it anew, where `jax.jvp` wants them.
        gradients: Takes `saved` and what enters; returns a gradient, or
            `None`, for each of `saved`.
    """
    if _in_forward_mode(jax.tree.leaves(saved)):
        return again(saved)

    @jax.custom_vjp
    def known(results: Any, saved: Any) -> Any:
        return results

    def forward(results: Any, saved: Any) -> tuple:
        return _known(results, saved, again, gradients), saved

    def backward(saved: Any, upstream: Any) -> tuple:
        return upstream, gradients(saved, upstream)

    known.defvjp(forward, backward)
    return known(results, saved)


def _gradients(function: Function, saved: Any, upstream: tuple) -> tuple:
    """Returns true gradients of what `call` has saved."""
    pull, factor, values = saved
    results, losses = upstream
    by = power.of(results, losses, factor)
    scaled = jax.tree.map(lambda gradient: _times(by.up, gradient), upstream)
    inside = _pulled(function, pull, values, scaled)
    new = iter(inside)
    gradients = [
        _unscaled(by.down, next(new)) if _is_float(value) else None
        for value in values
    ]
    return None, None, tuple(gradients)


def _pulled(
    function: Function, pull: Any, values: tuple, upstream: tuple
) -> list:
    """Pulls gradients back, with a border around that, too."""
    structure = jax.tree.structure((values, upstream))

    def pulled(*given: Any) -> Results:
        values, upstream = structure.unflatten(given)
        _, pull, _ = jax.vjp(
            _of_floats(function, values), *_floats(values), has_aux=True
        )
        return list(pull(upstream)), [], None

    def again(saved: Any) -> list:
        return call(pulled, jax.tree.leaves(saved))[0]

    def gradients(saved: Any, second: list) -> tuple:
        given = jax.tree.leaves(saved)

        def of_floats(*floats: Any) -> list:
            return call(pulled, _with_floats(given, floats))[0]

        _, pull = jax.vjp(of_floats, *_floats(given))
        new = iter(pull(second))
        leaves = [next(new) if _is_float(leaf) else None for leaf in given]
        second_gradients: tuple = structure.unflatten(leaves)
        return second_gradients

    results = list(pull(lax.stop_gradient(upstream)))
    same_results: list = _known(results, (values, upstream), again, gradients)
    return same_results


def _of_floats(function: Function, values: Sequence) -> Callable:
    """Returns a function of the floats among its arguments, as `vjp` wants."""

    def of_floats(*floats: Any) -> tuple[tuple[list, list], Any]:
        results, losses, others = function(*_with_floats(values, floats))
        return (results, losses), others

    return of_floats


def _floats(values: Sequence) -> list:
    return [value for value in values if _is_float(value)]


def _with_floats(values: Sequence, floats: Sequence) -> list:
    """Returns the values with others in the place of the floats."""
    new = iter(floats)
    return [next(new) if _is_float(value) else value for value in values]


def _is_float(value: Any) -> bool:
    return bool(jnp.issubdtype(value.dtype, jnp.inexact))


def _unscaled(down: Any, array: Any) -> Any:
    """Divides a gradient; what overflowed inside leaves as infinity, or NaN."""
    # Infinity, unless `down` is NaN.
    lost = lax.convert_element_type(down + jnp.inf, array.dtype)
    lost = lax.broadcast(lost, array.shape)
    return lax.select(jnp.isfinite(array), _times(down, array), lost)


def _times(factor: Any, array: Any) -> Any:
    # In float32 or wider, which hold every factor. By plain operations: for
    # hundreds of gradients those of `jnp` take a tenth of a step's tracing.
    dtype = jnp.promote_types(array.dtype, "float32")
    wide = lax.convert_element_type(array, dtype)
    factor = lax.convert_element_type(factor, dtype)
    product = lax.mul(wide, lax.broadcast(factor, array.shape))
    return lax.convert_element_type(product, array.dtype)
