"""The two gates of a model's call, under JAX, which a token joins.

Both are identities. Their tangents pass linear maps, each the transpose of the
other: one multiplies by a power of two and sends that on as the tangent of the
token, the other divides by what the token brings. Which of them comes first
depends on the mode: forwards it is the entrance, backwards the exit. A result
does not depend on the power, so the token's tangent is free to carry it.

A second derivative enters where the first one left, and meets what the first
one's results get from elsewhere. So all second derivatives have one fixed
power, which the token tells the exit.
"""

import contextlib
import functools
import itertools
import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend
from jax import lax
from jax import numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad, batching, mlir

from tfmix._keras import context, kernels, tapes
from tfmix.gradient_scaling import power
from tfmix.ops import tensors

# The factor that second derivatives are divided by where they leave. A passing
# gradient lies in the upper half of float16's range: if it belongs to a penalty
# times 1e-4, its digits stay, and if it belongs to one times 1e3, it has room.
_DOWN_OF_SECOND = 2.0**-9
# Where first derivatives lie that are differentiated again. What enters to do
# so has that much more room, since it meets them in products.
_PLACE_OF_FIRST = 4.0


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
        self._state = context.transformation()

    def enter(self, values: Sequence) -> list:
        """Returns the arrays for the code inside, in the same order."""
        given = [*filter(self._passes, values)]
        how = _Gate(True, (True,) * len(given))
        passed = iter(self._pass(how, given))
        return [next(passed) if self._passes(x) else x for x in values]

    def _passes(self, value: Any) -> bool:
        # Nothing else has a gradient.
        is_traced = isinstance(value, jax.core.Tracer)
        own = id(value) in self._overwritten
        return is_traced and not own and _is_float(value)

    def opened(self) -> contextlib.AbstractContextManager[None]:
        """Runs a block between the gates."""
        return context.holding(gates=self)

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
        passed = self._pass(_Gate(False, counts), arrays)
        return list(passed[: len(results)]), list(passed[len(results) :])

    def _pass(self, how: "_Gate", arrays: Sequence) -> tuple:
        # JAX sums the gradients of what `shard_map` shares outside of here.
        given = _varying_alike([self._token, *arrays])
        passed: tuple
        passed, self._token = _pass(given[1:], given[0], self._place, how)
        return passed

    def reach(self) -> bool:
        """Returns whether gradients of the running code know their power.

        Inside a loop, a branch or another transformation it may not, because
        the power is then no value of that function.
        """
        return bool(context.transformation() == self._state)

    def unscaled(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        """Calls a function of the user's, whose gradients are unscaled.

        It computes in float32. Its results have the dtypes they would have.
        """
        shaped = jax.eval_shape(lambda: function(*args, **kwargs))
        leaves, form = jax.tree.flatten((args, kwargs))
        places = [n for n, x in enumerate(leaves) if _is_array(x)]
        wide = [tensors.to_float32(leaves[n]) for n in places]
        unscaled = self._pass(_Gate(False, (True,) * len(wide)), wide)
        for n, x in zip(places, unscaled, strict=True):
            leaves[n] = x
        args, kwargs = jax.tree.unflatten(form, leaves)
        made = jax.tree.leaves(function(*args, **kwargs))
        made = self._pass(_Gate(True, (True,) * len(made)), made)
        shapes, form = jax.tree.flatten(shaped)
        narrow = [x.astype(y.dtype) for x, y in zip(made, shapes, strict=True)]
        return jax.tree.unflatten(form, narrow)


def of_users(original: Callable) -> Callable:
    """Returns the method that calls a `custom_vjp`; `original` is JAX's.

    Its gradient need not grow with what comes in: it may clip, or take the
    sign. In a float16 model it gets what float32 would give it.
    """

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(original, self)
        if context.active_rules():
            args = jax.tree.map(_narrowing_gradient, args)
        gates = context.block.get().gates
        if gates is None or tapes.is_linear(tapes.users_function(self)):
            return run(*args, **kwargs)
        # What it calls has no say in its gradient.
        with context.holding(gates=None):
            if gates.reach():
                return gates.unscaled(run, args, kwargs)
            tapes.say_scaled()
            return run(*args, **kwargs)

    return call


def _narrowing_gradient(value: Any) -> Any:
    """Returns a value whose gradient gets its dtype; XLA removes both casts.

    A wide op of the user's makes it float32, and JAX adds gradients of one
    value in one dtype.
    """
    if not tensors.is_16_bit(value):
        return value
    wide = jax.lax.convert_element_type(value, "float32")
    return jax.lax.convert_element_type(wide, value.dtype)


class _Gate(NamedTuple):
    """What a gate does with its operands.

    Attributes:
        enters: Whether it multiplies by a power of two, or divides by it.
        counts: For each array, whether it counts in the maximum.
        again: Whether these are derivatives of derivatives.
        backwards: Whether gradients pass it, not tangents.
        depth: The number of batches whose rows have powers of their own.
    """

    enters: bool
    counts: tuple
    again: bool = False
    backwards: bool = False
    depth: int = 0

    def bind(self, arrays: Sequence, operands: tuple) -> tuple[tuple, Any]:
        """Maps the arrays that may not be zero; returns all, and the token.

        Args:
            arrays: Tangents or gradients.
            operands: Two tokens that may bring a power, and the place.
        """
        zeros = SymbolicZero | ad.Zero
        live = [n for n, x in enumerate(arrays) if not isinstance(x, zeros)]
        counts = tuple(self.counts[n] for n in live)
        *passed, token = _gate.bind(
            *(arrays[n] for n in live),
            *operands,
            how=self._replace(counts=counts),
        )
        new = list(arrays)
        for n, x in zip(live, passed, strict=True):
            new[n] = x
        return tuple(new), token


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def _pass(
    values: tuple, token: Any, place: Any, how: _Gate
) -> tuple[tuple, Any]:
    return values, token


@functools.partial(_pass.defjvp, symbolic_zeros=True)
def _(how: _Gate, primals: tuple, tangents: tuple) -> tuple:
    values, token = _pass(*primals, how)
    of_values, of_token, _ = tangents
    if isinstance(of_token, SymbolicZero):
        of_token = jnp.zeros_like(token)
    passed = how.bind(of_values, (of_token, token, primals[2]))
    return (values, token), passed


def _into(how: _Gate, *given: Any) -> list:
    """Multiplies by a power of two; returns the arrays, and the token.

    Args:
        how: Says which arrays count, and whether they are second derivatives.
        *given: The arrays, two tokens that may bring a power, and the place.
    """
    *arrays, token, kept, place = given
    known = token + kept
    if arrays:
        counts, others = how.counts, map(operator.not_, how.counts)
        of_results = [*itertools.compress(arrays, counts)]
        of_losses = [*itertools.compress(arrays, others)]
        # A low place lowers what enters, too, although it lowers the first
        # derivatives that divide it.
        down = _DOWN_OF_SECOND / jnp.minimum(place, 1.0) ** 2
        if not (how.again and how.backwards):
            _, down = power.of(of_results, of_losses, place)
        chosen = jnp.stack([down, jnp.ones_like(down)], -1)
        known = jnp.where(known[..., 1:] == 0, chosen, known)
    return [*_times(1 / _down(known), arrays), known]


def _out_of(how: _Gate, *given: Any) -> list:
    """Divides by the power that the token brings."""
    del how
    *arrays, token, _, _ = given
    # XLA would otherwise repeat the division in every kernel that multiplies.
    down = kernels.kept_apart(_down(token))
    # This is infinity, unless `down` is NaN. It stays inside a program.
    return [*_times(down, arrays, lost=down + jnp.inf), token]


def _down(token: Any) -> Any:
    """Returns the factor that a token means; 1 if it passed no other gate.

    Several second derivatives may have told it, whose tokens are added.
    """
    total, count = token[..., 0], token[..., 1]
    return jnp.where(count == 0, 1.0, total / jnp.maximum(count, 1.0))


def _run(*given: Any, how: _Gate) -> list:
    function: Callable = functools.partial(
        _into if how.enters else _out_of, how
    )
    for _ in range(how.depth):
        function = jax.vmap(function)
    result: list = function(*given)
    return result


# One program is quicker than many operations in eager mode, too.
_compiled = jax.jit(_run, static_argnames="how")


def _pushed(
    primals: Sequence, tangents: Sequence, how: _Gate
) -> tuple[list, list]:
    """Pushes tangents forward.

    A tangent inside has the power of what it is a tangent of, times its own.
    """
    *given, place = primals
    if not how.again:
        place = _PLACE_OF_FIRST * jnp.minimum(place, 1.0)
    results = _gate.bind(*given, place, how=how)
    *moved, token, kept, _ = tangents
    told = ad.instantiate_zeros(token) + ad.instantiate_zeros(kept)
    # This is 0, but a pass that differentiates further finds the token by it.
    kept = results[-1] - lax.stop_gradient(results[-1])
    passed, of_token = how._replace(again=True, backwards=False).bind(
        moved, (told, kept, primals[-1])
    )
    # A token's own gradient is the token of another pass.
    token = lax.stop_gradient(results[-1] if how.enters else primals[-3])
    down = _down(token)
    factor = 1 / down if how.enters else down

    scaled = [
        x if isinstance(x, ad.Zero) else x * _spread(factor, x.shape, x.dtype)
        for x in passed
    ]
    return results, [*scaled, of_token]


def _pulled(upstream: Sequence, *primals: Any, how: _Gate) -> list:
    """Pulls gradients back, by the other map."""
    *arrays, token = upstream
    # Rows meet in what they share, so they get one power.
    other = how._replace(enters=not how.enters, backwards=True, depth=0)
    tokens = ad.instantiate_zeros(token), *primals[-2:]
    passed, token = other.bind(arrays, tokens)
    return [
        x if ad.is_undefined_primal(primal) else None
        for x, primal in zip((*passed, token, None, None), primals, strict=True)
    ]


def _batched(values: Sequence, axes: Sequence, how: _Gate) -> tuple[list, list]:
    """Gives all rows one power, or each its own if it has gradients of its own.

    A gradient of many rows, such as that of a weight, needs one power.
    """
    by_row = (how.enters and how.backwards) or any(
        axis is not None for axis in axes[-3:]
    )
    pairs = [*zip(values, axes, strict=True)]
    size = next(x.shape[axis] for x, axis in pairs if axis is not None)
    # Axes of the token come first.
    place = 0 if by_row else values[-2].ndim - 1

    def moved(x: Any, axis: int | None) -> Any:
        if axis is not None:
            return jnp.moveaxis(x, axis, place)
        return jnp.broadcast_to(x, (size, *x.shape)) if by_row else x

    results = _gate.bind(
        *itertools.starmap(moved, pairs),
        how=how._replace(depth=how.depth + by_row),
    )
    if by_row:
        return results, [0] * len(results)
    new = [None if axis is None else place for axis in axes[:-3]]
    return results, [*new, None]


_gate = jax.extend.core.Primitive("tfmix_gate")
_gate.multiple_results = True
_gate.def_impl(_compiled)
_gate.def_abstract_eval(lambda *given, **_: list(given[:-2]))
mlir.register_lowering(_gate, mlir.lower_fun(_run, multiple_results=True))
ad.primitive_jvps[_gate] = _pushed
ad.primitive_transposes[_gate] = _pulled
batching.primitive_batchers[_gate] = _batched


def _is_float(value: Any) -> bool:
    return bool(jnp.issubdtype(value.dtype, jnp.inexact))


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, tensors.ARRAYS) and _is_float(leaf)


def _varying_alike(values: Sequence) -> tuple:
    """Makes all arrays vary over every `shard_map` axis that one varies over.

    JAX then sums the gradients of the others. In a function with a custom
    gradient it leaves that to the author.
    """
    by_value = [(value, _varying_axes(value)) for value in values]
    every = frozenset().union(*(axes for _, axes in by_value))
    return tuple(
        value
        if axes == every
        else lax.pcast(value, tuple(every - axes), to="varying")
        for value, axes in by_value
    )


def _varying_axes(value: Any) -> frozenset[str]:
    kind = jax.typeof(value)
    # JAX before 0.10 calls it `vma`.
    axes = getattr(kind, "manual_axis_type", None)
    varying: frozenset[str] = (
        getattr(kind, "vma", frozenset()) if axes is None else axes.varying
    )
    return varying


def _times(factor: Any, arrays: Sequence, lost: Any = None) -> list:
    """Multiplies arrays; numbers that are not finite become `lost`, if any."""
    # Each equation takes time to trace and to compile, so gradients of one
    # shape share these arrays.
    by = functools.cache(functools.partial(_spread, factor))
    instead = functools.cache(functools.partial(_spread, lost))
    made = []
    for array in arrays:
        # Float32 and wider dtypes hold every factor. Plain operations are used
        # because those of `jnp` take a tenth of a step's tracing for hundreds
        # of gradients.
        shape, narrow = array.shape, array.dtype
        dtype = jnp.promote_types(narrow, "float32")
        wide = lax.convert_element_type(array, dtype)
        new = lax.convert_element_type(lax.mul(wide, by(shape, dtype)), narrow)
        if lost is not None:
            is_complex = jnp.issubdtype(narrow, jnp.complexfloating)
            is_finite = lax.is_finite(lax.abs(array) if is_complex else array)
            new = lax.select(is_finite, new, instead(shape, narrow))
        made.append(new)
    return made


def _spread(number: Any, shape: tuple, dtype: Any) -> Any:
    # There is one number for each row of a batch.
    axes = tuple(range(number.ndim))
    number = lax.convert_element_type(number, dtype)
    return lax.broadcast_in_dim(number, shape, axes)
