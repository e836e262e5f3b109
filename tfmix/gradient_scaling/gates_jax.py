"""The two gates of a model's call, under JAX, which a token joins.

Both are identities. Their tangents pass linear maps, each the transpose of the
other: one multiplies by a power of two and sends that on as the tangent of the
token, the other divides by what the token brings. Which of them comes first
depends on the mode: forwards it is the entrance, backwards the exit. A result
does not depend on the power, so the token's tangent is free to carry it.

A second derivative enters where the first one left. Two such passes through one
call could have different powers, whose sums would be wrong. So all second
derivatives have one fixed power, times the place: a second token tells the exit
that it is one.
"""

import contextlib
import functools
import itertools
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import jax.extend
from jax import lax
from jax import numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad, batching, mlir

from tfmix._keras import context_values, kernels, tracing
from tfmix.gradient_scaling import power
from tfmix.ops import jax_products

# The power of second derivatives. Gradients of a mean are small, so there is
# less room above it than below.
_UP_OF_SECOND = 2.0**8
# What the token brings then. Several of them are added, unlike powers.
_SECOND = -1.0


class _Shared:
    """Brings the power of a backward pass to users' gradient functions.

    Attributes:
        down: The reciprocal of the power of the pass that is traced now.
    """

    down: Any = None


def is_reached(array: Any, others: Sequence) -> bool:
    """Returns whether an array belongs to a running transformation.

    Layers may keep arrays of one that has ended.

    Args:
        array: The array.
        others: Arrays that do.
    """
    return tracing.is_traced_with(array, others)


class Gates:
    """The gates of one call.

    Args:
        place: Where gradients lie in float16's range: a number or a scalar.
        overwritten: The `id`s of arrays whose gradient is their next value,
            which passes no gate.
    """

    def __init__(self, place: Any, overwritten: Collection[int]) -> None:
        self._place = lax.stop_gradient(jnp.asarray(place, "float32"))
        self._overwritten = overwritten
        self._token: Any = jnp.zeros((), "float32")
        self._state = tracing.transformation()
        self._shared: _Shared | None = None

    def enter(self, values: Sequence) -> list:
        """Returns the arrays for the code inside, in the same order."""
        places = [n for n, value in enumerate(values) if self._passes(value)]
        # JAX sums the gradients of what `shard_map` shares outside of here.
        given = jax_products.varying_alike(
            [self._token, *(values[n] for n in places)]
        )
        passed, self._token = _enter(given[1:], given[0], self._place)
        inside = list(values)
        for n, value in zip(places, passed, strict=True):
            inside[n] = value
        return inside

    def _passes(self, value: Any) -> bool:
        # Nothing else has a gradient.
        is_traced = isinstance(value, jax.core.Tracer)
        own = id(value) in self._overwritten
        return is_traced and not own and _is_float(value)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Runs a block between the gates."""
        with context_values.holding(gates=self):
            yield

    def leave(self, results: Sequence, losses: Sequence) -> tuple[list, list]:
        """Returns the float arrays of a call for the code outside.

        Args:
            results: The arrays.
            losses: Losses that were added inside. Their gradients are often far
                larger than others, so they only count in the sum.
        """
        counts = (True,) * len(results) + (False,) * len(losses)
        # Losses may be numbers of Keras's own.
        arrays = tuple(map(jnp.asarray, (*results, *losses)))
        given = jax_products.varying_alike([self._token, *arrays])
        passed, _ = _leave(
            given[1:], given[0], self._place, counts, self._shared
        )
        return list(passed[: len(results)]), list(passed[len(results) :])

    def reach(self) -> bool:
        """Returns whether the running code may use `unscaled`.

        Inside a loop, a branch or another transformation it may not, because
        the power is then no value of that function.
        """
        return bool(tracing.transformation() == self._state)

    def unscaled(self, function: Callable, arrays: Sequence) -> Any:
        """Calls a user's function whose gradient function gets true gradients.

        Args:
            function: Takes float arrays; returns a nest.
            arrays: The arrays.
        """
        shared = self._shared = self._shared or _Shared()

        @jax.custom_vjp
        def called(*arrays: Any) -> Any:
            return function(*arrays)

        def backward(pull: Any, upstream: Any) -> tuple:
            down = lax.stop_gradient(shared.down)
            up = 1 / down
            true = jax.tree.map(functools.partial(_times_float, down), upstream)
            return tuple(_times_float(up, x) for x in pull(true))

        called.defvjp(functools.partial(jax.vjp, function), backward)
        return called(*arrays)


def _times_float(factor: Any, array: Any) -> Any:
    return array * factor if _is_float(array) else array


@jax.custom_jvp
def _enter(values: tuple, token: Any, place: Any) -> tuple[tuple, Any]:
    return values, token


@functools.partial(_enter.defjvp, symbolic_zeros=True)
def _(primals: tuple, tangents: tuple) -> tuple:
    values, token = _enter(*primals)
    passed = _bind(
        tangents[0],
        (jnp.zeros_like(token), token, primals[2]),
        enters=True,
        fresh=True,
        backwards=False,
        counts=(True,) * len(values),
        shared=None,
        depth=0,
    )
    return (values, token), passed


@functools.partial(jax.custom_jvp, nondiff_argnums=(3, 4))
def _leave(
    results: tuple, token: Any, place: Any, counts: tuple, shared: Any
) -> tuple[tuple, Any]:
    return results, token


@functools.partial(_leave.defjvp, symbolic_zeros=True)
def _(counts: tuple, shared: Any, primals: tuple, tangents: tuple) -> tuple:
    results, token = _leave(*primals, counts, shared)
    of_results, of_token, _ = tangents
    if isinstance(of_token, SymbolicZero):
        of_token = jnp.zeros_like(token)
    passed = _bind(
        of_results,
        (of_token, token, primals[2]),
        enters=False,
        fresh=True,
        backwards=False,
        counts=counts,
        shared=shared,
        depth=0,
    )
    return (results, token), passed


def _bind(
    arrays: Sequence, operands: tuple, *, counts: tuple, **how: Any
) -> tuple[tuple, Any]:
    """Maps the arrays that may not be zero; returns all, and the token.

    Args:
        arrays: Tangents or gradients.
        operands: Two tokens that may bring a power, and the place.
        counts: Which arrays count in the maximum.
        **how: As for `_into` and `_run`.
    """
    zeros = SymbolicZero | ad.Zero
    live = [n for n, x in enumerate(arrays) if not isinstance(x, zeros)]
    *passed, token = _gate.bind(
        *(arrays[n] for n in live),
        *operands,
        counts=tuple(counts[n] for n in live),
        **how,
    )
    new = list(arrays)
    for n, x in zip(live, passed, strict=True):
        new[n] = x
    return tuple(new), token


def _into(*given: Any, fresh: bool, counts: tuple, **_: Any) -> list:
    """Multiplies by a power of two; returns the arrays, and the token.

    Args:
        *given: The arrays, two tokens that may bring a power, and the place.
        fresh: Whether to choose a power if they bring none.
        counts: Which arrays count in the maximum.
    """
    *arrays, token, kept, place = given
    up, sent = _UP_OF_SECOND * place, _SECOND
    if fresh and arrays:
        of_results = [*itertools.compress(arrays, counts)]
        of_losses = itertools.compress(arrays, map(operator.not_, counts))
        up, sent = power.of(of_results, [*of_losses], place)
    known = token + kept
    up = jnp.where(known == 0, up, 1 / _down(known, place))
    sent = jnp.where(known == 0, sent, jnp.where(known < 0, _SECOND, known))
    spread = functools.cache(functools.partial(_spread, up))
    return [*(_times(spread, x) for x in arrays), sent]


def _out_of(*given: Any, **_: Any) -> list:
    """Divides by the power that the token brings."""
    *arrays, token, _, place = given
    # XLA would otherwise repeat the division in every kernel that multiplies.
    down = kernels.kept_apart(_down(token, place))
    # Each equation takes time to trace and to compile, so gradients of one
    # shape share these arrays.
    spread = functools.cache(functools.partial(_spread, down))
    # This is infinity, unless `down` is NaN. It stays inside a program.
    lost = functools.cache(functools.partial(_spread, down + jnp.inf))
    return [*(_unscaled(spread, lost, x) for x in arrays), token]


def _down(token: Any, place: Any) -> Any:
    """Returns the factor that a token means; 1 if it passed no other gate."""
    of_first = jnp.where(token == 0, 1.0, token)
    return jnp.where(token < 0, 1 / (_UP_OF_SECOND * place), of_first)


def _run(
    *given: Any, enters: bool, depth: int, shared: Any, **how: Any
) -> list:
    del shared
    function: Callable = functools.partial(_into if enters else _out_of, **how)
    for _ in range(depth):
        function = jax.vmap(function)
    result: list = function(*given)
    return result


# One program is quicker than many operations in eager mode, too.
_compiled = jax.jit(
    _run,
    static_argnames=(
        "enters",
        "depth",
        "shared",
        "fresh",
        "backwards",
        "counts",
    ),
)


def _run_eagerly(*given: Any, shared: Any, **how: Any) -> list:
    del shared
    results: list = _compiled(*given, shared=None, **how)
    return results


def _pushed(
    primals: Sequence,
    tangents: Sequence,
    enters: bool,
    backwards: bool,
    counts: tuple,
    **how: Any,
) -> tuple[list, list]:
    """Pushes tangents forward.

    A tangent inside has the power of what it is a tangent of, times its own.
    """
    results = _gate.bind(
        *primals, enters=enters, backwards=backwards, counts=counts, **how
    )
    *moved, token, kept, _ = tangents
    tokens = ad.instantiate_zeros(token), ad.instantiate_zeros(kept)
    passed, of_token = _bind(
        moved,
        (*tokens, primals[-1]),
        enters=enters,
        backwards=False,
        counts=counts,
        **how,
    )
    down = _down(results[-1] if enters else primals[-3], primals[-1])
    factor = 1 / down if enters else down

    def scaled(x: Any) -> Any:
        if isinstance(x, ad.Zero):
            return x
        wide = factor.reshape(factor.shape + (1,) * (x.ndim - factor.ndim))
        return x * wide.astype(x.dtype)

    return results, [*map(scaled, passed), of_token]


def _pulled(
    upstream: Sequence,
    *primals: Any,
    enters: bool,
    fresh: bool,
    backwards: bool,
    shared: Any,
    **how: Any,
) -> list:
    """Pulls gradients back, by the other map."""
    del backwards
    *arrays, token = upstream
    token = ad.instantiate_zeros(token)
    # If the exit's second token has a gradient, this is a second derivative.
    kept, place = primals[-2:]
    is_second = enters or ad.is_undefined_primal(kept)
    if is_second:
        kept = jnp.zeros_like(token)
    passed, token = _bind(
        arrays,
        (token, kept, place),
        enters=not enters,
        fresh=fresh and not is_second,
        backwards=True,
        shared=shared,
        **how,
    )
    if shared is not None and not enters:
        shared.down = _down(token, place)
    return [
        x if ad.is_undefined_primal(primal) else None
        for x, primal in zip(
            (*passed, token, token, None), primals, strict=True
        )
    ]


def _batched(
    values: Sequence,
    axes: Sequence,
    enters: bool,
    backwards: bool,
    depth: int,
    **how: Any,
) -> tuple[list, list]:
    """Gives all rows one power, or each its own if it has gradients of its own.

    A gradient of many rows, such as that of a weight, needs one power.
    """
    *arrays, token, kept, place = axes
    del arrays, place
    by_row = (enters and backwards) or (token, kept) != (None, None)
    bind = functools.partial(
        _gate.bind, enters=enters, backwards=backwards, **how
    )
    if not by_row:
        moved = [
            value if axis is None else jnp.moveaxis(value, axis, depth)
            for value, axis in zip(values, axes, strict=True)
        ]
        if axes[-1] is not None:
            moved[-1] = jnp.min(moved[-1], depth)
        results = bind(*moved, depth=depth)
        new = [axis if axis is None else depth for axis in axes[:-3]]
        return results, [*new, None]
    (size, *_) = (
        value.shape[axis]
        for value, axis in zip(values, axes, strict=True)
        if axis is not None
    )
    rows = [
        jnp.broadcast_to(value, (size, *value.shape))
        if axis is None
        else jnp.moveaxis(value, axis, 0)
        for value, axis in zip(values, axes, strict=True)
    ]
    results = bind(*rows, depth=depth + 1)
    return results, [0] * len(results)


_gate = jax.extend.core.Primitive("tfmix_gate")
_gate.multiple_results = True
_gate.def_impl(_run_eagerly)
_gate.def_abstract_eval(lambda *given, **_: list(given[:-2]))
mlir.register_lowering(_gate, mlir.lower_fun(_run, multiple_results=True))
ad.primitive_jvps[_gate] = _pushed
ad.primitive_transposes[_gate] = _pulled
batching.primitive_batchers[_gate] = _batched


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
