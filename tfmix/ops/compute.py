"""What an op computes while a 16-bit policy is active.

Every op of Keras and every operator of tensors goes through `by_rules`. It
looks once at the arguments and takes one of a few ways. By default, an op whose
16-bit arguments are all copies of weights computes in float32, and its result
is a copy again. Any other op hands on what is known of its argument, so that
small numbers reach logarithms, roots and quotients in float32. `table` lists
what is particular about single ops.

Torch's autocast returns float32 from such ops. Here every op returns 16 bit, so
that your code never meets another dtype.
"""

import dataclasses
import functools
import inspect
import math
import threading
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

from tfmix import _formats
from tfmix._keras import (
    context_values,
    global_state,
    kernels,
    op_places,
    tracing,
)
from tfmix._keras import variables as keras_variables
from tfmix.ops import exact_values, tensors
from tfmix.ops.exact_values import Exact, Known

# A smaller number is one of a sum's last digits in bfloat16, and its powers in
# a layer may underflow in float16.
_SMALL = 2.0**-6
# The sum of so few terms is exact to some units of a 16-bit last place.
_FEW = 64
_NUMBERS = (int, float, np.integer, np.floating)
# A union of types is made anew wherever it is written.
_NESTS, _ARRAYS = (list, tuple, dict), (np.generic, np.ndarray)
_PLAIN = frozenset((str, bool, type(None), type(...), slice))
_ON_TENSORFLOW = keras.backend.backend() == "tensorflow"
_block = context_values.block.get


class _Local(threading.local):
    # Whether Keras's own function of an op runs in this thread. What it calls
    # is not replaced.
    inside = False


local = _Local()


@dataclasses.dataclass(frozen=True)
class Op:
    """What is particular about an op.

    Attributes:
        number: What a number beside a tensor is: "term" or "factor" of a
            result that stays finite; "" for a size, an axis or a setting. A
            factor's product may round to zero. Elsewhere, a number that would
            become zero is there to prevent a division by zero.
        begins: Whether its result is worth a note: "sum" computes what would be
            lost in 16 bit; the results of "curve" can be small or large for
            arguments that are neither, and so can a "product" of two tensors,
            if it is a square; only ops with an unbounded derivative use what is
            behind "flat": it saturates, as a probability does that
            16 bit rounds, or it multiplies a gradient that may be beyond
            float16, such as that of `log(relu(x) + 1e-6)`, by 0.
        passes: What is known of its argument that it hands on: "all"; "lost",
            what 16 bit loses; "" for a product.
        asks: The arguments near which its derivative is unbounded.
        by_weight: Computes it with one weight and one input, so that the
            weight's gradient is float32. By default, the op computes in
            float32.
        is_wide: Whether it computes in float32 under any policy.
        biases: Whether it adds a small 16-bit tensor to many rows.
        way: Computes it in a way of its own.
    """

    number: str = ""
    begins: str = ""
    passes: str = "all"
    asks: tuple[int, ...] = ()
    by_weight: Callable[["Call"], Any] | None = None
    is_wide: bool = False
    biases: bool = False
    way: Callable[["Call"], Any] | None = None


USUAL = Op()


class Function:
    """Keras's function of an op, with its row of the table.

    Attributes:
        original: The function.
        row: The row.
        is_reversed: Whether it takes its second factor first.
        is_composed: Whether it calls other ops, which compute as usual.
        dtype_at: The position of its `dtype` argument, `None` without one.
    """

    def __init__(self, original: Callable, row: Op, is_reversed: bool) -> None:
        self.original, self.row = original, row
        self.is_reversed = is_reversed
        self.is_composed = (
            original.__name__ == op_places.MAP
            or original.__module__ in op_places.COMPOSED
        )
        # `inspect.signature` takes 20 times as long, for hundreds of ops.
        code = getattr(inspect.unwrap(original), "__code__", None)
        count = code.co_argcount + code.co_kwonlyargcount if code else 0
        names = code.co_varnames[:count] if code else ()
        self.dtype_at = names.index("dtype") if "dtype" in names else None

    def run(self, args: tuple, kwargs: dict) -> Any:
        """Calls Keras's function; what it calls is not replaced."""
        if self.is_reversed:
            args = args[::-1]
        if self.is_composed or local.inside:
            return self.original(*args, **kwargs)
        local.inside = True
        try:
            return self.original(*args, **kwargs)
        finally:
            local.inside = False


class Call:
    """One call of an op, and what is known of its arguments.

    Attributes:
        op: The function.
        args: The positional arguments, with variables read.
        kwargs: The keyword arguments, with variables read.
        came: The arguments as they came.
        is_ruled: Whether a policy's rule computes this op in float32.
        dtype: The 16-bit dtype of all float tensors; "" without one, "mixed"
            if they have several.
        tensors: The 16-bit tensors.
        exact: The note on each of these, `None` without one.
        weights: How many of them are copies of weights.
        noted: How many of them have another float32 value that is known.
        numbers: The numbers among the arguments.
        read: The values of variables, by their `id`s.
    """

    __slots__ = (
        "args",
        "came",
        "dtype",
        "exact",
        "is_ruled",
        "kwargs",
        "noted",
        "numbers",
        "op",
        "read",
        "tensors",
        "weights",
    )

    def __init__(
        self, op: Function, args: tuple, kwargs: dict, is_ruled: bool
    ) -> None:
        self.op, self.is_ruled = op, is_ruled
        if op.is_reversed:
            args = args[::-1]
        self.came = args, kwargs
        self.args, self.kwargs = args, kwargs

    def look(self) -> None:
        """Reads the variables, and finds tensors, their notes, and numbers."""
        self.dtype, self.weights, self.noted = "", 0, 0
        self.tensors: list[Any] = []
        self.exact: list[Exact | None] = []
        self.numbers: list[Any] = []
        self.read: dict[int, Any] = {}
        args = [self._see(value, True) for value in self.args]
        self.args = tuple(args)
        if self.kwargs:
            self.kwargs = {
                name: self._see(value, True)
                for name, value in self.kwargs.items()
            }

    def _see(self, value: Any, is_argument: bool = False) -> Any:
        """Notes what an argument is; returns it, or a variable's value."""
        kind: Any = type(value)
        if kind is float or kind is int:
            if is_argument:
                self.numbers.append(value)
            return value
        if kind in _PLAIN:
            return value
        if isinstance(value, _NESTS):
            for one in value.values() if isinstance(value, dict) else value:
                self._see(one)
            if not self.read:
                return value
            return tensors.with_leaves(value, self.read)
        if keras_variables.is_variable_type(kind):
            # A layer's variables of other dtypes are handed on as they came.
            dtype = str(value.dtype)
            if dtype in _formats.SIXTEEN_BIT:
                name = id(value)
                if name not in self.read:
                    self.read[name] = keras_variables.read_by_layer(value)
                value = self.read[name]
        else:
            own = getattr(value, "dtype", None)
            dtype = "" if own is None else tensors.known_dtype(kind, own)
        if isinstance(value, _ARRAYS) and _is_number(value):
            if is_argument:
                self.numbers.append(value)
            return value
        if not dtype:
            return value
        if dtype in _formats.SIXTEEN_BIT:
            exact = exact_values.note(value)
            self.tensors.append(value)
            self.exact.append(exact)
            if exact is not None:
                self.weights += exact.origin == exact_values.WEIGHT
                self.noted += exact.origin == exact_values.OP
        if not self.dtype:
            self.dtype = dtype
        elif dtype != self.dtype:
            both = "sparse" in (dtype, self.dtype)
            self.dtype = "sparse" if both else "mixed"
        return value

    def as_it_came(self) -> Any:
        """Computes with the arguments as they came."""
        return self.op.run(*self.came)

    def plain(self) -> Any:
        """Computes in 16 bit."""
        return self.op.run(self.args, self.kwargs)

    def with_factors(self, first: Any, second: Any) -> Callable:
        """Returns the op as a function of two of its arguments.

        A gradient holds the function, which therefore holds neither of them.
        """
        run, count = self.op.run, len(self.args)
        rest: dict[Any, Any] = {**dict(enumerate(self.args)), **self.kwargs}
        one_at, other_at = (
            next(name for name, value in rest.items() if value is factor)
            for factor in (first, second)
        )
        rest |= {one_at: None, other_at: None}

        def function(one: Any, other: Any) -> Any:
            given = {**rest, one_at: one, other_at: other}
            args = tuple([given.pop(place) for place in range(count)])
            return run(args, given)

        return function

    def in_float32(self, change: Callable[[Any], Any]) -> Any:
        """Computes with changed arguments, and with float32 as its dtype."""
        args, kwargs = tensors.map_leaves((self.args, self.kwargs), change)
        place = self.op.dtype_at
        if place is not None and self.wanted() is not None:
            if len(args) > place:
                args = (*args[:place], "float32", *args[place + 1 :])
            else:
                kwargs = {**kwargs, "dtype": "float32"}
        return self.op.run(args, kwargs)

    def wanted(self) -> str | None:
        """Returns the dtype that the call asks for, `None` without one."""
        place = self.op.dtype_at
        if place is None:
            return None
        at_place = self.args[place : place + 1]
        wanted = at_place[0] if at_place else self.kwargs.get("dtype")
        return (
            None if wanted is None else keras.backend.standardize_dtype(wanted)
        )

    def weight_at(self) -> int | None:
        """Returns which of two 16-bit tensors is a weight, if one is."""
        if len(self.tensors) != 2:
            return None
        first, second = map(_is_weight, self.exact)
        return int(second) if first != second else None


def _is_weight(exact: Exact | None) -> bool:
    return exact is not None and exact.origin == exact_values.WEIGHT


def _is_number(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.shape == () and value.dtype.kind in "iuf"
    return isinstance(value, _NUMBERS)


def by_rules(
    original: Callable,
    name: str,
    rows: Mapping[str, Op],
    is_reversed: bool = False,
) -> Callable:
    """Returns Keras's function of an op, computed by the rules of its caller.

    Args:
        original: The function.
        name: The name of the op.
        rows: The rows of ops by their names.
        is_reversed: Whether the function takes its second factor first.
    """
    op = Function(original, rows.get(name, USUAL), is_reversed)
    way = op.row.way or usual

    @functools.wraps(original)
    def computed(*args: Any, **kwargs: Any) -> Any:
        if local.inside:
            return original(*args, **kwargs)
        # This is `context_values.active_rules`; nothing is called more often.
        names = _block().rules
        if names is None:
            names = context_values.installed.rules
        if not names:
            return original(*args, **kwargs)
        return way(Call(op, args, kwargs, name in names))

    return computed


def usual(call: Call) -> Any:
    """Computes an op that has no way of its own."""
    call.look()
    row = call.op.row
    if not call.tensors:
        return made(call)
    if call.dtype == "sparse":
        return call.as_it_came()
    wanted = call.wanted()
    if call.dtype == "mixed" or not (
        wanted is None or wanted in _formats.SIXTEEN_BIT
    ):
        return _beside_float32(call)
    dtype = wanted or call.dtype
    if call.weights == len(call.tensors):
        return _of_weights(call, dtype)
    is_sum = row.begins == "sum"
    if (is_sum and not row.asks) or _is_of_vectors(call):
        return _summed(call, dtype)
    known = _handed_on(call) if call.noted else []
    if known and (any(exact.is_wide for exact in known) or _asks(call)):
        return _in_float32_now(call, dtype)
    if call.is_ruled and _casts_in_each_step():
        # TensorFlow's kernels cast each tensor on its own, in each step.
        return _in_float32_now(call, dtype)
    if is_sum:
        return _summed(call, dtype)
    if row.number and call.numbers and _is_unfit(call, dtype):
        result = _finite(call, dtype)
    elif call.is_ruled or row.is_wide:
        result = rounded(call, dtype)
    elif call.weights:
        result = with_weights(call, dtype)
    elif (place := _often_repeated(call)) is not None:
        result = _with_repeated(call, place, dtype)
    else:
        result = call.plain()
    return _noted(call, result, known)


def made(call: Call) -> Any:
    """Computes an op without 16-bit tensors, which may make one of a number."""
    if call.op.row.number and call.numbers and _is_unfit(call, "float16"):
        dtype = call.wanted()
        if dtype in _formats.SIXTEEN_BIT and _is_unfit(call, dtype):
            return _finite(call, dtype)
    return call.as_it_came()


# Each of these is one way in which `usual` computes an op.


def _beside_float32(call: Call) -> Any:
    """Computes with the float32 values of weights, and of what 16 bit loses."""
    given = call.args, call.kwargs
    args, kwargs = tensors.map_leaves(given, exact_values.if_lost)
    if args is given[0] and kwargs is given[1]:
        return call.as_it_came()
    return call.op.run(args, kwargs)


def _of_weights(call: Call, dtype: str) -> Any:
    """Computes in float32; the result is a copy of a weight again."""
    narrow = tensors.narrow
    if call.op.row.number and _is_unfit(call, dtype):
        narrow = tensors.finite

    def copy(weight: Any) -> Any:
        narrowed = narrow(weight, dtype)
        if narrowed is weight:
            return weight
        return exact_values.weight_copy(weight, narrowed)

    def compute() -> Any:
        return tensors.map_leaves(call.in_float32(exact_values.of), copy)

    loop = context_values.block.get().loop
    if loop is None:
        return compute()
    leaves = tensors.leaves((call.args, call.kwargs))
    given = [leaf for leaf in leaves if keras.ops.is_tensor(leaf)]
    return loop.computed(given, compute)


def _summed(call: Call, dtype: str) -> Any:
    """Computes a sum in float32, and keeps what it rounds."""
    has_products = any(x is not None and x.is_product for x in call.exact)
    value = call.in_float32(_exact(call, {}) if has_products else widened)
    # The variance of large numbers is beyond float16, and Keras limits it.
    round_once = tensors.finite if isinstance(value, tuple) else tensors.narrow
    return _kept(value, functools.partial(round_once, dtype=dtype))


def _in_float32_now(call: Call, dtype: str) -> Any:
    """Computes in float32, and keeps that for what uses it."""
    value = call.in_float32(_exact(call, {}))
    # A small number beside 0 stays above 0, as a constant does.
    is_quotient = call.op.row.asks == (1,)
    narrow = functools.partial(
        tensors.finite if is_quotient else tensors.narrow, dtype=dtype
    )
    if _is_activation(call, value):
        return tensors.map_leaves(value, narrow)
    return _kept(value, narrow, is_wide=True, is_exact=_is_exact(call))


def _finite(call: Call, dtype: str) -> Any:
    """Computes a number that 16 bit lacks in float32; it stays finite.

    `scores + (1 - mask) * -1e9` is infinity times 0 in float16, and `x / (x +
    1e-9)` is 0 divided by 0.
    """

    def changed(value: Any) -> Any:
        # TensorFlow casts a NumPy number to the dtype of the tensor.
        if _ON_TENSORFLOW and isinstance(value, np.generic):
            return value.item()
        return widened(value)

    result = call.in_float32(changed)
    if call.op.row.number == "term":
        result = tensors.not_zero(result, dtype)
    return tensors.finite(result, dtype)


def rounded(call: Call, dtype: str) -> Any:
    """Computes in float32, and rounds once."""
    value = call.in_float32(widened)
    narrow = functools.partial(tensors.narrow, dtype=dtype)
    if len(getattr(value, "shape", "unknown")) == 0:
        # So a large penalty that was summed in float32 reaches `add_loss`.
        return _kept(value, narrow, is_exact=False)
    return tensors.map_leaves(value, narrow)


def with_weights(call: Call, dtype: str) -> Any:
    """Computes with weights and inputs."""
    in_map = context_values.block.get().in_map
    if call.op.row.by_weight is None or in_map:
        return rounded(call, dtype)
    return call.op.row.by_weight(call)


def _with_repeated(call: Call, place: int, dtype: str) -> Any:
    """Computes with a tensor for many rows, whose gradient sums over these."""
    repeated = call.tensors[place]
    weight = exact_values.of(repeated)
    if call.op.row.by_weight is None or len(call.tensors) != 2:
        result = call.in_float32(
            lambda x: weight if x is repeated else widened(x)
        )
        return tensors.map_leaves(
            result, functools.partial(tensors.narrow, dtype=dtype)
        )
    copy = exact_values.weight_copy(weight, kernels.cast(weight, call.dtype))
    call.args = tuple(copy if x is repeated else x for x in call.args)
    call.tensors[place], call.exact[place] = copy, exact_values.note(copy)
    return call.op.row.by_weight(call)


def _noted(call: Call, result: Any, known: list[Exact]) -> Any:
    """Notes on a result how to compute it in float32."""
    begins = _begins(call)
    is_exact = bool(call.op.row.passes and (known or call.weights))
    is_exact = is_exact and _is_exact(call)
    if not (begins or known or is_exact):
        return result
    if global_state.on_shapes_only():
        return result
    is_lost = begins == "lost" or not (begins or known)
    is_lost = is_lost or any(exact.is_lost for exact in known)
    depth = 1 + max((exact.depth for exact in known), default=0)
    again = _Again(call)
    for place, leaf in enumerate(tensors.leaves(result)):
        is_same = any(leaf is value for value in call.tensors)
        if is_same or _is_activation(call, leaf):
            continue
        compute = functools.partial(again.part, place)
        exact_values.put(
            leaf,
            Exact(
                compute,
                depth=depth,
                is_lost=is_lost,
                is_exact=is_exact,
                is_product=call.op.row.begins == "product",
            ),
        )
    return result


class _Again:
    """Computes an op once more, in float32."""

    def __init__(self, call: Call) -> None:
        self.call = call

    def part(self, place: int, known: Known) -> Any:
        """Returns one of its results."""
        if id(self) not in known:
            result = self.call.in_float32(_exact(self.call, known))
            known[id(self)] = self, list(tensors.leaves(result))
        return known[id(self)][1][place]


# The questions that `usual` asks, in the order in which it asks them.


def _is_unfit(call: Call, dtype: str) -> bool:
    """Returns whether a number would be infinite, or zero, in a format."""
    limits = _formats.LIMITS[dtype]
    return any(
        limits.max < abs(number) < math.inf
        # Half of the smallest number rounds to zero.
        or 0 < abs(number) <= limits.smallest / 2
        for number in call.numbers
    )


def _is_of_vectors(call: Call) -> bool:
    """Returns whether a product sums number by number, as one of vectors."""
    if call.op.row.passes or len(call.tensors) != 2:
        return False
    if call.args and isinstance(call.args[0], str):
        sides = call.args[0].replace(" ", "").split("->")[0].split(",")
        return sides[0] == sides[-1]
    return all(_rank(x) == 1 for x in call.tensors)


def _rank(tensor: Any) -> int | None:
    """Returns the number of axes, `None` where TensorFlow does not know."""
    shape = tensor.shape
    return None if getattr(shape, "rank", 0) is None else len(shape)


def _handed_on(call: Call) -> list[Exact]:
    """Returns what is known of its arguments that the op hands on."""
    passes = call.op.row.passes
    if not passes:
        return []
    return [
        exact
        for exact in call.exact
        if exact is not None
        and exact.origin == exact_values.OP
        and (exact.is_lost or passes == "all")
    ]


def _asks(call: Call) -> bool:
    """Returns whether an op's derivative is unbounded at a noted input."""
    row = call.op.row
    if row.begins == "power":
        exponent = call.args[1]
        is_whole = isinstance(exponent, int | float) and exponent >= 0
        if is_whole and float(exponent).is_integer():
            return False
    at = call.args[: 1 + max(row.asks)] if row.asks else ()
    for place in row.asks:
        for leaf in tensors.leaves(at[place : place + 1]):
            exact = exact_values.note(leaf)
            if exact is not None and exact.origin == exact_values.OP:
                return True
    return False


def _begins(call: Call) -> str:
    """Returns "lost" if 16 bit may lose the result, "flat", or ""."""
    row = call.op.row
    if row.begins == "flat" and not any(map(_is_small, call.numbers)):
        return "flat"
    if row.begins in ("curve", "power"):
        return "lost"
    if row.number and any(map(_is_small, call.numbers)):
        return "lost"
    if row.begins != "product" or len(call.tensors) != 2:
        return ""
    return "lost" if call.tensors[0] is call.tensors[1] else "flat"


def _casts_in_each_step() -> bool:
    """Returns whether TensorFlow's kernels compute the step of a loop."""
    in_loop = context_values.block.get().in_loop
    return in_loop and tracing.in_graph_without_xla()


def _is_small(number: Any) -> bool:
    return 0 < abs(number) < _SMALL


def _is_exact(call: Call) -> bool:
    """Returns whether all 16-bit tensors have exact float32 values."""
    return all(
        exact is not None
        and exact.origin != exact_values.INPUT
        and exact.is_exact
        for exact in call.exact
    )


def _is_activation(call: Call, result: Any) -> bool:
    """Returns whether an op applied small numbers to activations.

    Its result is as large as the activations, such as a layer's input divided
    by its norm. A float32 version of it beside the 16-bit one would cost
    memory.
    """
    is_lost = [
        exact is not None and exact.origin == exact_values.OP and exact.is_lost
        for exact in call.exact
    ]
    # What other ops place beside activations, or choose among them, they keep.
    applies = call.op.row.number or call.op.row.asks
    if not applies or not any(is_lost) or all(is_lost):
        return False
    shape = getattr(result, "shape", None)
    alike = [
        lost
        for lost, value in zip(is_lost, call.tensors, strict=True)
        if shape is not None and bool(value.shape == shape)
    ]
    return bool(alike) and not any(alike) and not _is_exact(call)


def _often_repeated(call: Call) -> int | None:
    """Returns which 16-bit tensor an op repeats for many rows."""
    row = call.op.row
    # Products, and what places tensors beside each other, repeat none.
    is_other = not row.passes or row.by_weight is Call.plain
    if len(call.tensors) < 2 or is_other:
        return None
    if any(_rank(x) is None for x in call.tensors):
        return None
    sizes = [size(x.shape) for x in call.tensors]
    if not is_often(min(sizes), max(sizes)):
        return None
    place = sizes.index(min(sizes))
    # A note may lead to a weight, whose gradient may be beyond float16.
    exact = call.exact[place]
    is_known = exact is not None and exact.origin == exact_values.OP
    is_bias = row.biases and len(sizes) == 2 and not _ON_TENSORFLOW
    return place if is_known or is_bias or _sums_in_16_bit(call) else None


def size(shape: Any) -> Any:
    """Returns the size of a tensor; an axis of unknown length is long."""
    return math.prod(_FEW + 1 if n is None else n for n in shape)


def is_often(few: Any, many: Any) -> bool:
    """Returns whether 16 bit loses digits of sums over `many / few` terms.

    A program of JAX for any batch size has sizes that are no numbers.
    """
    numbers = isinstance(few, int) and isinstance(many, int)
    return numbers and many > _FEW * few


def _sums_in_16_bit(call: Call) -> bool:
    """Returns whether the gradient of a repeated tensor is a 16-bit sum.

    TensorFlow's kernels of a CPU sum in 16 bit. XLA and GPUs round the sum.
    """
    if not _ON_TENSORFLOW or tracing.by_xla():
        return False
    return not tracing.for_gpu(call.tensors[0])


def widened(value: Any) -> Any:
    """Returns a 16-bit tensor in float32, as exact as a cast gives it."""
    if not tensors.is_16_bit(value):
        return value
    return tensors.to_float32(exact_values.if_lost(value))


def _exact(call: Call, known: Known) -> Callable[[Any], Any]:
    return functools.partial(exact_values.of, known=known)


def _kept(value: Any, narrow: Callable[[Any], Any], **properties: bool) -> Any:
    """Rounds float32 tensors, and keeps them as what is behind the results."""

    def rounded(leaf: Any) -> Any:
        result = narrow(leaf)
        if not global_state.on_shapes_only():
            exact_values.keep(result, leaf, **properties)
        return result

    return tensors.map_leaves(value, rounded)


# Ways of single ops, which `table` names.


def converted(call: Call) -> Any:
    """Casts; back in float32, a tensor is what it was before it was rounded."""
    if call.args and isinstance(call.args[0], keras.Variable):
        # A variable that is cast is a snapshot.
        call.args = (keras_variables.read(call.args[0]), *call.args[1:])
    call.look()
    if not call.tensors:
        return made(call)
    value, exact = call.tensors[0], call.exact[0]
    if exact is None or exact.origin == exact_values.INPUT:
        return call.plain()
    dtype = call.wanted()
    if dtype == "float32" and exact.is_lost:
        return exact_values.of(value)
    result = call.plain()
    if result is not value and dtype in _formats.SIXTEEN_BIT:
        exact_values.put(result, exact)
    return result


def parted(call: Call) -> Any:
    """Splits; the parts that a loop needs in float32 are cast as a whole."""
    result = usual(call)
    if not (call.tensors and _casts_in_each_step()):
        return result
    again = _Again(call)
    by_trace: dict[Any, Known] = {}

    def part(place: int, known: Known) -> Any:
        return again.part(place, by_trace.setdefault(tracing.trace(), known))

    for place, leaf in enumerate(tensors.leaves(result)):
        if exact_values.note(leaf) is None:
            exact_values.put(
                leaf,
                Exact(
                    functools.partial(part, place),
                    depth=1,
                    is_lost=False,
                    is_exact=False,
                ),
            )
    return result


def normalized(call: Call) -> Any:
    """Normalizes with weights in float32; the result is like its input."""
    call.look()
    given = call.args[0] if call.args else call.kwargs["x"]
    if not (tensors.is_16_bit(given) and call.weights):
        return usual(call)
    result = call.in_float32(widened)
    return tensors.narrow(result, tensors.float_dtype(given))


def mapped(call: Call) -> Any:
    """Runs a function for each row, by ops that TensorFlow can convert.

    What converts them loses gradients that are not TensorFlow's own.
    """
    with context_values.holding(in_map=_ON_TENSORFLOW):
        return call.as_it_came()
