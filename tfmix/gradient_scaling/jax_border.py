"""The scaling border around a function, under JAX."""

import functools
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jax.custom_derivatives import SymbolicZero

from tfmix._keras import compilation, context_values, linear_maps
from tfmix.gradient_scaling import power
from tfmix.ops import jax_products

# A function of arrays that returns float results, losses, and the rest.
Results = tuple[list, list, Any]
Function = Callable[..., Results]


def call(
    function: Function, values: Sequence, overwritten: Collection[int] = ()
) -> Results:
    """Calls a function whose gradients are scaled inside it only.

    Each backward pass finds a power of two that brings the incoming gradients
    to order one, and divides by it where gradients leave. Gradients of these
    gradients have such a border, too, which runs the function again for each
    order.

    Args:
        function: Takes arrays; returns results, losses that were added inside,
            whose gradients are often far larger, and a nest of other values
            that no gradient passes through.
        values: All arrays it depends on. Those of float dtypes get gradients.
        overwritten: The `id`s of arrays whose gradient is their next value,
            which leaves as it is.

    Returns:
        What the function returns.
    """
    as_values = [id(value) in overwritten for value in values]
    # JAX turns NumPy arrays into constants, for which it takes no gradients.
    values = jax_products.varying_alike(map(jnp.asarray, values))
    # Derivatives are taken only at the border.
    fixed = lax.stop_gradient(values)
    results, pull, others = jax.vjp(
        _of_floats(function, fixed), *_floats(fixed), has_aux=True
    )
    results, losses = _known(
        results,
        (pull, context_values.block.get().placing),
        values,
        function,
        functools.partial(_gradients, function, as_values),
    )
    return results, losses, others


def _known(
    results: Any,
    kept: Any,
    values: Sequence,
    function: Function,
    gradients: Callable,
) -> Any:
    """Returns results whose gradients come from a function of our own.

    Other inputs, such as values that a function closes over, lie outside the
    border. Their gradients are unscaled.

    Args:
        results: The float arrays that `function` returned: results, losses.
        kept: A nest of arrays for `gradients`.
        values: The arrays that get gradients, and others.
        function: Computes the results from `values`.
        gradients: Takes `kept`, `values` and the incoming gradients; returns a
            gradient for each float of `values`.
    """

    @jax.custom_jvp
    def known(results: Any, kept: Any, values: Sequence) -> Any:
        return results

    # Zeros for all that is kept would take a tenth of a step's tracing in a
    # model with hundreds of layers.
    @functools.partial(known.defjvp, symbolic_zeros=True)
    def _(primals: tuple, tangents: tuple) -> tuple:
        results, kept, values = primals
        beyond, _, at_border = tangents
        pushed = linear_maps.apply(
            lambda fixed, vector: _pushed(function, fixed[1], vector),
            lambda fixed, upstream: gradients(*fixed, upstream),
            (kept, values),
            [
                _tangent(tangent)
                for value, tangent in zip(values, at_border, strict=True)
                if _is_float(value)
            ],
            results,
        )
        # A second derivative cannot pass through `results` themselves.
        return known(*primals), jax.tree.map(_moved, beyond, pushed)

    return known(results, kept, values)


def _pushed(function: Function, values: Sequence, tangents: list) -> tuple:
    """Pushes tangents forward, with a border around that, too."""
    given, structure = jax.tree.flatten((values, tangents))

    def pushed(*given: Any) -> Results:
        values, tangents = structure.unflatten(given)
        of_floats, floats = _of_floats(function, values), _floats(values)
        _, moved, _ = jax.jvp(of_floats, floats, tangents, has_aux=True)
        return (*moved, None)

    return call(pushed, given)[:2]


def _gradients(
    function: Function,
    as_values: Sequence[bool],
    kept: tuple,
    values: tuple,
    upstream: tuple,
) -> list:
    """Returns the unscaled gradients of the arguments of `call`."""
    pull, factor = kept
    results, losses = upstream
    by = power.of(results, losses, factor)
    up = functools.partial(_spread, by.up)
    scaled = jax.tree.map(functools.partial(_times, up), upstream)
    inside = _pulled(function, pull, values, scaled)
    # XLA would otherwise repeat the division in every kernel that multiplies.
    down = compilation.kept_apart(by.down)
    # Each equation takes time to trace and to compile, so gradients of one
    # shape share these arrays.
    spread = functools.cache(functools.partial(_spread, down))
    # This is infinity, unless `down` is NaN.
    lost = functools.cache(functools.partial(_spread, lax.add(down, jnp.inf)))
    floats = map(_is_float, values)
    return [
        gradient if as_value else _unscaled(spread, lost, gradient)
        for gradient, as_value in zip(
            inside, itertools.compress(as_values, floats), strict=True
        )
    ]


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
    """Returns a function of the floats among its arguments, for `vjp`."""

    def of_floats(*floats: Any) -> tuple[tuple[list, list], Any]:
        results, losses, others = function(*_with_floats(values, floats))
        return (results, losses), others

    return of_floats


def _floats(values: Sequence) -> list:
    return [value for value in values if _is_float(value)]


def _with_floats(values: Sequence, floats: Sequence) -> list:
    """Returns the values with the floats replaced."""
    new = iter(floats)
    return [next(new) if _is_float(value) else value for value in values]


def _is_float(value: Any) -> bool:
    return bool(jnp.issubdtype(value.dtype, jnp.inexact))


def _unscaled(down: Callable, lost: Callable, array: Any) -> Any:
    """Divides a gradient; numbers that are not finite become `lost`."""
    is_complex = jnp.issubdtype(array.dtype, jnp.complexfloating)
    is_finite = jnp.isfinite if is_complex else lax.is_finite
    overflow = lost(array.shape, array.dtype)
    return lax.select(is_finite(array), _times(down, array), overflow)


def _times(factor: Callable, array: Any) -> Any:
    """Multiplies by a factor, which is a function of a shape and a dtype."""
    # Float32 and wider dtypes hold every factor. Plain operations are used
    # because those of `jnp` take a tenth of a step's tracing for hundreds of
    # gradients.
    dtype = jnp.promote_types(array.dtype, "float32")
    wide = lax.convert_element_type(array, dtype)
    product = lax.mul(wide, factor(array.shape, dtype))
    return lax.convert_element_type(product, array.dtype)


def _spread(number: Any, shape: tuple, dtype: Any) -> Any:
    return lax.broadcast(lax.convert_element_type(number, dtype), shape)
