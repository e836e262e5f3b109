"""The two gates of a model's call, under JAX, which a token joins.

Both are identities. Their tangents pass linear maps, each the transpose of the
other: one multiplies by a power of two and sends that on as the tangent of the
token, the other divides by what the token brings. Which of them comes first
depends on the mode: forwards it is the entrance, backwards the exit. A result
does not depend on the power, so the token's tangent is free to carry it.

A second derivative enters where the first one left, and meets what the first
one's results get from elsewhere: the token tells the exit which power it has.
Unknown gradients may meet it there, so its power is limited.
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

# These bits of a power of two are 0.
_MANTISSA = 2**23 - 1


class _Shared:
    """What the gates of one call know while a backward pass is traced.

    Attributes:
        entered: The token of the last pass that entered.
        second: The token of the last second derivative that entered. Others
            need the same power, because they meet inside.
    """

    entered: Any = None
    second: Any = None

    def told(self, token: Any, arrays: Sequence) -> Any:
        """Returns the token of a second derivative that enters."""
        if not isinstance(token, ad.Zero):
            return token
        known, shape = self.second, token.aval.shape
        live = (x for x in arrays if not isinstance(x, ad.Zero))
        traces = {getattr(x, "_trace", None) for x in live}
        if known is None or getattr(known, "_trace", None) not in traces:
            return token
        return jnp.broadcast_to(known.reshape(-1, 2)[0], shape)


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
        self._token: Any = jnp.zeros(2, "float32")
        self._state = tracing.transformation()
        self._shared = _Shared()

    def enter(self, values: Sequence) -> list:
        """Returns the arrays for the code inside, in the same order."""
        places = [n for n, value in enumerate(values) if self._passes(value)]
        counts = (True,) * len(places)
        passed = self._pass(True, [values[n] for n in places], counts)
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
        arrays = [*map(jnp.asarray, (*results, *losses))]
        passed = self._pass(False, arrays, counts)
        return list(passed[: len(results)]), list(passed[len(results) :])

    def _pass(self, enters: bool, arrays: Sequence, counts: tuple) -> tuple:
        # JAX sums the gradients of what `shard_map` shares outside of here.
        given = jax_products.varying_alike([self._token, *arrays])
        passed, self._token = _pass(
            given[1:], given[0], self._place, enters, counts, self._shared
        )
        return passed

    def reach(self) -> bool:
        """Returns whether gradients of the running code know their power.

        Inside a loop, a branch or another transformation it may not, because
        the power is then no value of that function.
        """
        return bool(tracing.transformation() == self._state)

    def down(self) -> Any:
        """Returns what divides the gradients of the pass that is traced now."""
        return lax.stop_gradient(_down(self._shared.entered))


@functools.partial(jax.custom_jvp, nondiff_argnums=(3, 4, 5))
def _pass(
    values: tuple,
    token: Any,
    place: Any,
    enters: bool,
    counts: tuple,
    shared: _Shared,
) -> tuple[tuple, Any]:
    return values, token


@functools.partial(_pass.defjvp, symbolic_zeros=True)
def _(
    enters: bool,
    counts: tuple,
    shared: _Shared,
    primals: tuple,
    tangents: tuple,
) -> tuple:
    values, token = _pass(*primals, enters, counts, shared)
    of_values, of_token, _ = tangents
    if isinstance(of_token, SymbolicZero):
        of_token = jnp.zeros_like(token)
    passed = _bind(
        of_values,
        (of_token, token, primals[2]),
        enters=enters,
        fresh=True,
        backwards=False,
        counts=counts,
        shared=shared,
        depth=0,
    )
    return (values, token), passed


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
        fresh: Whether this is no second derivative.
        counts: Which arrays count in the maximum.
    """
    *arrays, token, kept, place = given
    known = token + kept
    if arrays:
        of_results = [*itertools.compress(arrays, counts)]
        of_losses = itertools.compress(arrays, map(operator.not_, counts))
        _, down = power.of(of_results, [*of_losses], place, not fresh)
        chosen = jnp.stack([down, jnp.ones_like(down)], -1)
        known = jnp.where(known[..., 1:] == 0, chosen, known)
    spread = functools.cache(functools.partial(_spread, 1 / _down(known)))
    return [*(_times(spread, x) for x in arrays), known]


def _out_of(*given: Any, **_: Any) -> list:
    """Divides by the power that the token brings."""
    *arrays, token, _, _ = given
    # XLA would otherwise repeat the division in every kernel that multiplies.
    down = kernels.kept_apart(_down(token))
    # Each equation takes time to trace and to compile, so gradients of one
    # shape share these arrays.
    spread = functools.cache(functools.partial(_spread, down))
    # This is infinity, unless `down` is NaN. It stays inside a program.
    lost = functools.cache(functools.partial(_spread, down + jnp.inf))
    return [*(_unscaled(spread, lost, x) for x in arrays), token]


def _down(token: Any) -> Any:
    """Returns the factor that a token means; 1 if it passed no other gate.

    Several passes may have told it. They have one power, or the result is NaN.
    """
    total, count = token[..., 0], token[..., 1]
    down = jnp.where(count == 0, 1.0, total / jnp.maximum(count, 1.0))
    mantissa = kernels.bitcast(down, "int32") & _MANTISSA
    return jnp.where(mantissa == 0, down, jnp.nan)


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
    down = _down(results[-1] if enters else primals[-3])
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
    shared: _Shared,
    depth: int,
    **how: Any,
) -> list:
    """Pulls gradients back, by the other map."""
    del backwards, depth
    *arrays, token = upstream
    # If the exit's second token has a gradient, this is a second derivative.
    kept, place = primals[-2:]
    is_second = enters or not fresh or ad.is_undefined_primal(kept)
    if is_second and not enters:
        token = shared.told(token, arrays)
    token = ad.instantiate_zeros(token)
    if is_second:
        kept = jnp.zeros_like(token)
    passed, token = _bind(
        arrays,
        (token, kept, place),
        enters=not enters,
        fresh=not is_second,
        backwards=True,
        shared=shared,
        # Rows meet in what they share, so they get one power.
        depth=0,
        **how,
    )
    if not enters:
        shared.entered = token
        if is_second:
            shared.second = token
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
    place = values[-1]
    by_row = (enters and backwards) or (axes[-3], axes[-2]) != (None, None)
    bind = functools.partial(
        _gate.bind, enters=enters, backwards=backwards, **how
    )
    if not by_row:
        # Those of the token come first.
        inner = values[-2].ndim - 1
        moved = [
            value if axis is None else jnp.moveaxis(value, axis, inner)
            for value, axis in zip(values[:-1], axes[:-1], strict=True)
        ]
        if axes[-1] is not None:
            place = jnp.min(values[-1], axes[-1])
        results = bind(*moved, place, depth=depth)
        new = [axis if axis is None else inner for axis in axes[:-3]]
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
    # There is one number for each row of a batch.
    axes = tuple(range(number.ndim))
    number = lax.convert_element_type(number, dtype)
    return lax.broadcast_in_dim(number, shape, axes)
