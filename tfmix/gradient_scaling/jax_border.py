"""The scaling border around a function, under JAX."""

import functools
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jax.custom_derivatives import SymbolicZero

from tfmix._keras import (
    context_values,
    kernels,
    linear_maps,
    tracing,
)
from tfmix.gradient_scaling import power
from tfmix.ops import jax_products

# A function of arrays that returns float results, losses, and the rest.
Results = tuple[list, list, Any]
Function = Callable[..., Results]
# The float32 results of a user's function, and a function that turns them into
# its result.
Part = tuple[list, Callable]


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
    parts: list[Part] = []
    while True:
        run = _Run(function, len(values), parts)
        entered = itertools.chain(*(made for made, _ in parts))
        # JAX turns NumPy arrays into constants, for which it takes no
        # gradients.
        given = jax_products.varying_alike(
            map(jnp.asarray, [*values, *entered])
        )
        # Derivatives are taken only at the border.
        fixed = lax.stop_gradient(given)
        results, pull, others = jax.vjp(
            _of_floats(run, fixed), *_floats(fixed), has_aux=True
        )
        flags = [False] * len(given)
        if run.next_part is None:
            flags[: len(values)] = as_values
        results, losses = _known(
            results,
            (pull, context_values.block.get().place),
            given,
            run,
            functools.partial(_gradients, run, flags),
        )
        if run.next_part is None:
            return results, losses, others
        compute, merged = run.next_part
        parts = [*parts, compute(merged(results, losses, others))]


class _Run:
    """Runs a function, of which some parts are computed outside.

    A user's gradient function is such a part: it gets the unscaled gradient,
    and what comes before it has a power of two of its own. XLA merges what
    several runs compute.

    Args:
        function: The function.
        count: The number of its arguments.
        parts: The first parts, which are computed already.
    """

    # Whether a part was inside a loop, a branch or another transformation,
    # which nothing can leave before its end. JAX keeps what it has traced of
    # these, so other runs do not notice.
    is_nested = False

    def __init__(
        self, function: Function, count: int, parts: Sequence[Part]
    ) -> None:
        self._function, self._count = function, count
        self._parts = parts
        # Computes the part after these, from arrays that the other function
        # merges from what the run returns.
        self.next_part: Any = None

    def __call__(self, *given: Any) -> Results:
        """Returns the results, or the float32 arguments of the next part.

        Args:
            *given: The arguments of the function, and the parts' results.
        """
        state = tracing.transformation()
        known, entered = iter(self._parts), iter(given[self._count :])
        left: list[Results] = []

        def outside(compute: Callable, arrays: list) -> Any:
            if tracing.transformation() != state:
                _Run.is_nested = True
                return _inside(compute, arrays)
            for made, rebuilt in known:
                return rebuilt([next(entered) for _ in made])
            if not left:
                split, merged = _by_size(arrays)
                left.append(split)
                self.next_part = compute, merged
            # What comes after it does not count.
            made, rebuilt = compute(arrays)
            return rebuilt(made)

        with context_values.holding(outside=outside):
            results = self._function(*given[: self._count])
        return left[0] if left else results

    def with_power(self, by: power.Power) -> Function:
        """Returns the function for gradients that are scaled by this power."""

        def run(*given: Any) -> Results:
            with (
                context_values.holding(power=by),
                tracing.traced_apart(by.up),
            ):
                return self(*given)

        return run


def _inside(compute: Callable, arrays: list) -> Any:
    """Computes a part inside, with unscaled gradients if the power is known."""
    by = context_values.block.get().power
    if by is None:
        made, rebuilt = compute(arrays)
        return rebuilt(made)
    made, rebuilt = compute(
        [_gate(_wide(x), by.up) if _is_float(x) else x for x in arrays]
    )
    return rebuilt([_gate(x, by.down) for x in made])


@jax.custom_vjp
def _gate(array: Any, factor: Any) -> Any:
    """Returns an array, whose gradient is multiplied by a factor."""
    return array


_gate.defvjp(
    lambda array, factor: (array, factor),
    lambda factor, upstream: (upstream * factor, None),
)


def _wide(array: Any) -> Any:
    return array.astype(jnp.promote_types(array.dtype, "float32"))


def _by_size(arrays: list) -> tuple[Results, Callable[..., list]]:
    """Returns 16-bit arrays in float32, other float arrays, and the rest.

    The second may be the state of a quantized layer, far larger than gradients.
    It also returns a function that takes three such lists, and puts them
    together.
    """
    kinds = [
        2 if not _is_float(x) else int(x.dtype.itemsize > 2) for x in arrays
    ]
    split: Results = ([], [], [])
    for kind, array in zip(kinds, arrays, strict=True):
        split[kind].append(_wide(array) if kind == 0 else array)

    def merged(*split: Sequence) -> list:
        rest = [*map(iter, split)]
        return [next(rest[kind]) for kind in kinds]

    return split, merged


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
        # A second derivative cannot pass through `results` themselves. If the
        # rule held `known`, which holds the rule, arrays would be freed late.
        again = _known(results, kept, values, function, gradients)
        return again, jax.tree.map(_moved, beyond, pushed)

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
    run: _Run,
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
    function: Function = run
    if _Run.is_nested:
        # These parts have to know the power of two.
        function = run.with_power(lax.stop_gradient(by))
        _, pull, _ = jax.vjp(
            _of_floats(function, values), *_floats(values), has_aux=True
        )
    inside = _pulled(function, pull, values, scaled, factor)
    # XLA would otherwise repeat the division in every kernel that multiplies.
    down = kernels.kept_apart(by.down)
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
    function: Function, pull: Any, values: tuple, upstream: tuple, factor: Any
) -> list:
    """Pulls gradients back, with a border around that, too."""
    given, structure = jax.tree.flatten((values, upstream))

    def pulled(*given: Any) -> Results:
        values, upstream = structure.unflatten(given)
        _, pull, _ = jax.vjp(
            _of_floats(function, values), *_floats(values), has_aux=True
        )
        return list(pull(upstream)), [], None

    def gradients(factor: Any, given: Sequence, second: tuple) -> list:
        def of_floats(*floats: Any) -> list:
            with context_values.holding(place=factor):
                return call(pulled, _with_floats(given, floats))[0]

        _, pull = jax.vjp(of_floats, *_floats(given))
        return list(pull(second[0]))

    results = list(pull(lax.stop_gradient(upstream)))
    same_results: list = _known(
        (results, []), factor, given, pulled, gradients
    )[0]
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
