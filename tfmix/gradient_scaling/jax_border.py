"""A border around a function, under JAX."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jax.custom_derivatives import SymbolicZero

from tfmix._keras import linear_maps
from tfmix.gradient_scaling import jax_products, power

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
    # Who differentiates does so at the border alone.
    fixed = lax.stop_gradient(values)
    results, pull, others = jax.vjp(
        _of_floats(function, fixed), *_floats(fixed), has_aux=True
    )
    results, losses = _known(
        results,
        (pull, power.placing()),
        values,
        function,
        functools.partial(_gradients, function),
    )
    return results, losses, others


def _known(
    results: Any,
    kept: Any,
    values: Sequence,
    function: Function,
    gradients: Callable,
) -> Any:
    """Returns results, whose gradients a function of one's own finds.

    What they were made of beside `values`, as what a function closes over, is
    beyond the border: it gets true gradients that nothing scales.

    Args:
        results: The float arrays that `function` returned: results, losses.
        kept: A nest of arrays that `gradients` takes.
        values: The arrays that get gradients, and others.
        function: What the results were made of `values` by.
        gradients: Takes `kept`, `values` and what enters; returns a gradient
            for each float of `values`.
    """

    @jax.custom_jvp
    def known(results: Any, kept: Any, values: Sequence) -> Any:
        return results

    # No zeros are made for all that is kept: for hundreds of layers these
    # take a tenth of a step's tracing.
    @functools.partial(known.defjvp, symbolic_zeros=True)
    def _(primals: tuple, tangents: tuple) -> tuple:
        results, kept, values = primals
        beyond, _, at_border = tangents
        leaves, nest = jax.tree.flatten(results)
        saved, structure = jax.tree.flatten((kept, values))
        count = len(saved)

        def push(*given: Any) -> Results:
            _, values = structure.unflatten(given[:count])
            (_, pushed, _) = jax.jvp(
                _of_floats(function, values),
                _floats(values),
                list(given[count:]),
                has_aux=True,
            )
            return (*pushed, None)

        def forward(*given: Any) -> list:
            return jax.tree.leaves(push(*given))

        def transpose(*given: Any) -> list:
            kept, values = structure.unflatten(given[:count])
            upstream = nest.unflatten(given[count:])
            return gradients(kept, values, upstream)

        def differentiable(*given: Any) -> list:
            return jax.tree.leaves(call(push, given))

        pushed = linear_maps.apply(
            forward,
            transpose,
            differentiable,
            saved,
            [
                _tangent(tangent)
                for value, tangent in zip(values, at_border, strict=True)
                if _is_float(value)
            ],
            leaves,
        )
        moved = jax.tree.map(_moved, beyond, nest.unflatten(pushed))
        # Not `results` themselves, which no second derivative passes through.
        return known(*primals), moved

    return known(results, kept, values)


def _gradients(
    function: Function, kept: tuple, values: tuple, upstream: tuple
) -> list:
    """Returns true gradients of what `call` was given."""
    pull, factor = kept
    results, losses = upstream
    by = power.of(results, losses, factor)
    scaled = jax.tree.map(lambda gradient: _times(by.up, gradient), upstream)
    inside = _pulled(function, pull, values, scaled)
    return [_unscaled(by.down, gradient) for gradient in inside]


def _pulled(
    function: Function, pull: Any, values: tuple, upstream: tuple
) -> list:
    """Pulls gradients back, with a border around that, too."""
    given, structure = jax.tree.flatten((values, upstream))

    def pulled(*given: Any) -> Results:
        values, upstream = structure.unflatten(given)
        _, pull, _ = jax.vjp(
            _of_floats(function, values), *_floats(values), has_aux=True
        )
        return list(pull(upstream)), [], None

    def gradients(_: Any, given: Sequence, second: tuple) -> list:
        def of_floats(*floats: Any) -> list:
            return call(pulled, _with_floats(given, floats))[0]

        _, pull = jax.vjp(of_floats, *_floats(given))
        return list(pull(second[0]))

    results = list(pull(lax.stop_gradient(upstream)))
    same_results: list = _known((results, []), (), given, pulled, gradients)[0]
    return same_results


def _tangent(tangent: Any) -> Any:
    """Returns a tangent as an array."""
    is_zero = isinstance(tangent, SymbolicZero)
    return jnp.zeros(tangent.shape, tangent.dtype) if is_zero else tangent


def _moved(first: Any, second: Any) -> Any:
    """Returns the sum of two tangents, the first of which may be zero."""
    return second if isinstance(first, SymbolicZero) else lax.add(first, second)


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
    lost = lax.full_like(array, jnp.inf)
    is_complex = jnp.issubdtype(array.dtype, jnp.complexfloating)
    is_finite = jnp.isfinite if is_complex else lax.is_finite
    # Infinity, unless `down` is NaN.
    return _times(down, lax.select(is_finite(array), array, lost))


def _times(factor: Any, array: Any) -> Any:
    # In float32 or wider, which hold every factor. By plain operations: for
    # hundreds of gradients those of `jnp` take a tenth of a step's tracing.
    dtype = jnp.promote_types(array.dtype, "float32")
    wide = lax.convert_element_type(array, dtype)
    factor = lax.convert_element_type(factor, dtype)
    product = lax.mul(wide, lax.broadcast(factor, array.shape))
    return lax.convert_element_type(product, array.dtype)
