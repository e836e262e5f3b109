"""What an op computes while a 16-bit policy is active.

Every op of Keras and every operator of tensors goes through `apply`, which
looks once at the arguments. The three lists of the policy decide (`op_lists`):
a narrow op takes 16 bit, a wide op computes in float32 and returns float32, and
an op that is float32 inside returns 16 bit. Any other op takes what comes:
beside float32, 16 bit is widened, as Keras's ops do.

Three more things are known of what comes. What is made of weights alone is
computed in float32 and stays a weight, whose gradient is float32. A number that
16 bit cannot hold widens. So does arithmetic on an input that was only cast.
"""

import functools
import inspect
import itertools
import math
import threading
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

from tfmix import _formats
from tfmix._keras import context, op_places, tapes
from tfmix._keras import variables as keras_variables
from tfmix.ops import tensors
from tfmix.policy import op_lists

products: Any
if keras.backend.backend() == "tensorflow":
    from tfmix.ops import tensorflow_products

    products = tensorflow_products
else:
    from tfmix.ops import jax_products

    products = jax_products

# The sum of so few terms is exact to some units of a 16-bit last place.
_FEW = 64
_NUMBERS = (int, float, np.integer, np.floating)
# A union of types is made anew wherever it is written.
_NESTS = (list, tuple, dict)
_PLAIN = frozenset((str, bool, type(None), type(...), slice))
_SETTINGS = frozenset((*_PLAIN, int, float))
_ON_TENSORFLOW = keras.backend.backend() == "tensorflow"
_block = context.block.get
# A variable carries this: the function that multiplies by it.
CHOSEN = "_tfmix_chosen_product"
# Takes a 16-bit tensor, the float32 weight and the equation of their product;
# returns that in the dtype of the tensor, or `None` if it does not support it.
Multiply = Callable[[Any, Any, str], Any]


class _Local(threading.local):
    # Whether Keras's own function of an op runs in this thread. What it calls
    # is not replaced.
    inside = False


_local = _Local()


class Function:
    """Keras's function of an op.

    Attributes:
        original: The function.
        name: The name of the op.
        is_reversed: Whether it takes its second factor first.
        is_composed: Whether it runs a function of its caller, whose ops compute
            as usual.
        dtype_at: The position of its `dtype` argument, `None` without one.
    """

    def __init__(self, original: Callable, name: str, is_reversed: bool):
        self.original, self.name = original, name
        self.is_reversed = is_reversed
        self.is_composed = original.__name__ in op_places.WITH_FUNCTIONS
        # `inspect.signature` takes 20 times as long, for hundreds of ops.
        code = getattr(inspect.unwrap(original), "__code__", None)
        count = code.co_argcount + code.co_kwonlyargcount if code else 0
        names = code.co_varnames[:count] if code else ()
        self.dtype_at = names.index("dtype") if "dtype" in names else None

    def by_name(self, args: tuple, kwargs: dict) -> dict[str, Any]:
        """Returns arguments by their names, with defaults."""
        bound = inspect.signature(self.original).bind(*args, **kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)

    def run(self, args: tuple, kwargs: dict) -> Any:
        """Calls Keras's function; what it calls is not replaced."""
        if self.is_reversed:
            args = args[::-1]
        if self.is_composed or _local.inside:
            return self.original(*args, **kwargs)
        _local.inside = True
        try:
            return self.original(*args, **kwargs)
        finally:
            _local.inside = False


class Call:
    """One call of an op, and what is known of its arguments.

    Attributes:
        op: The function.
        args: The positional arguments, with variables read.
        kwargs: The keyword arguments, with variables read.
        is_ruled: Whether the policy computes this op in float32.
        tensors: The 16-bit tensors, and beside them what wide ops made of
            weights alone.
        copies: The note on each of these, `None` without one.
        weights: How many of them are weights.
        inputs: How many of them are inputs that were only cast.
        dtype: The dtype of the 16-bit tensors, "" without one.
        has_wide: Whether there is another float tensor of another dtype.
        is_sparse: Whether there is a sparse tensor.
        numbers: The numbers among the arguments.
        multiply: What a variable's products are computed by, if that is chosen.
        wide: The other float tensors.
    """

    def __init__(
        self, op: Function, args: tuple, kwargs: dict, is_ruled: bool
    ) -> None:
        self.op, self.is_ruled = op, is_ruled
        self.args = args[::-1] if op.is_reversed else args
        self.kwargs = kwargs

    def look(self) -> None:
        """Reads the variables, and finds tensors, their notes, and numbers."""
        self.dtype, self.has_wide, self.is_sparse = "", False, False
        self.tensors: list[Any] = []
        self.numbers: list[Any] = []
        self.wide: list[Any] = []
        self.copies: list[tensors.Copy | None] = []
        self.weights = self.inputs = 0
        self.multiply: Multiply | None = None
        self.args = tuple(map(self._see, self.args))
        values = map(self._see, self.kwargs.values())
        self.kwargs = dict(zip(self.kwargs, values, strict=True))
        if not self.dtype:
            return
        if self.wide:
            notes = [*map(tensors.note, self.wide)]
            self.has_wide = self.has_wide or None in notes
            self.tensors += itertools.compress(self.wide, notes)
        self.copies = [*map(tensors.note, self.tensors)]
        are_weights = [copy.is_weight for copy in self.copies if copy]
        self.weights = sum(are_weights)
        self.inputs = len(are_weights) - self.weights

    def _see(self, value: Any, is_argument: bool = True) -> Any:
        """Notes what an argument is; returns it, or a variable's value."""
        kind: Any = type(value)
        if kind in _PLAIN:
            return value
        if _is_number(value):
            if is_argument:
                self.numbers.append(value)
            return value
        if isinstance(value, _NESTS):
            # Most of them are shapes and axes.
            if not isinstance(value, dict):
                if _SETTINGS.issuperset(map(type, value)):
                    return value
            inside = functools.partial(self._see, is_argument=False)
            return tensors.map_leaves(value, inside)
        if keras_variables.derives(kind, keras.Variable):
            # A layer's variables of other dtypes are handed on as they came.
            dtype = keras_variables.dtype_read(value)
            if dtype in _formats.SIXTEEN_BIT:
                self.multiply = getattr(value, CHOSEN, self.multiply)
                value = keras_variables.read_by_layer(value)
        else:
            own = getattr(value, "dtype", None)
            dtype = "" if own is None else tensors.known_dtype(kind, own)
        if dtype in _formats.SIXTEEN_BIT:
            self.has_wide = self.has_wide or self.dtype not in ("", dtype)
            self.dtype = dtype
            self.tensors.append(value)
        elif dtype:
            self.is_sparse = self.is_sparse or dtype == "sparse"
            self.wide.append(value)
        return value

    def plain(self) -> Any:
        """Computes in the dtypes of the arguments."""
        return self.op.run(self.args, self.kwargs)

    def run_with(self, new: Any, old: Any) -> Any:
        """Computes with one argument in place of another, named or not."""
        args, kwargs = tensors.map_leaves(
            (self.args, self.kwargs), lambda x: new if x is old else x
        )
        return self.op.run(args, kwargs)

    def in_float32(self) -> Any:
        """Computes in float32, with float32 as the dtype if 16 bit is asked."""
        args, kwargs = tensors.map_leaves(
            (self.args, self.kwargs), tensors.to_float32
        )
        place = self.op.dtype_at
        if place is not None and self.wanted() in _formats.SIXTEEN_BIT:
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

    def of_two(self, first: Any, second: Any) -> Callable:
        """Returns the op as a function of two of its arguments."""
        run, count, names = self.op.run, len(self.args), [*self.kwargs]
        values = [*self.args, *self.kwargs.values()]
        ids = [*map(id, values)]
        one, other = ids.index(id(first)), ids.index(id(second))
        # JAX keeps the function longer than the tensors that it is made for.
        values[one] = values[other] = None

        def function(*factors: Any) -> Any:
            every = [*values]
            every[one], every[other] = factors
            kwargs = dict(zip(names, every[count:], strict=True))
            return run(tuple(every[:count]), kwargs)

        return function


def _is_number(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.shape == () and value.dtype.kind in "iuf"
    return isinstance(value, _NUMBERS)


# Takes a call that has not been looked at; computes it.
Way = Callable[[Call], Any]


def by_rules(
    original: Callable,
    name: str,
    ways: Mapping[str, Way],
    is_reversed: bool = False,
) -> Callable:
    """Returns Keras's function of an op, computed by the rules of its caller.

    Args:
        original: The function.
        name: The name of the op.
        ways: The functions that compute some ops, by their names. All others
            are computed by `apply`.
        is_reversed: Whether the function takes its second factor first.
    """
    if name in op_lists.EXACT:
        return original
    op = Function(original, name, is_reversed)
    way = ways.get(name, apply)

    @functools.wraps(original)
    def computed(*args: Any, **kwargs: Any) -> Any:
        if _local.inside:
            return original(*args, **kwargs)
        # This is `context.active_rules`; nothing is called more often.
        names = _block().rules
        if names is None:
            names = context.installed.rules
        if not names:
            return original(*args, **kwargs)
        return way(Call(op, args, kwargs, name in names))

    return computed


def apply(call: Call) -> Any:
    """Computes an op by the lists and by what comes."""
    call.look()
    return decide(call)


def decide(call: Call) -> Any:
    """Computes an op whose arguments were looked at."""
    if not call.tensors:
        return _made(call)
    if call.is_sparse:
        return call.plain()
    divisor = call.args[1] if len(call.args) > 1 else None
    if call.op.name in op_lists.QUOTIENTS and isinstance(divisor, _NUMBERS):
        # It is a product with the reciprocal.
        call.is_ruled = False
    if call.weights == len(call.tensors) and not call.has_wide:
        return _of_weights(call)
    name = call.op.name
    if name in ("sigmoid", "tanh") and _casts_in_each_step():
        return call.plain()
    if call.is_ruled or _is_wide(call):
        return _in_float32(call)
    if name in op_lists.NARROW:
        # What is float32 beside it is multiplied in 16 bit, too.
        return with_weights(call)
    if call.has_wide:
        return call.in_float32()
    if name in op_lists.OF_ANGLES:
        angle = tensors.note(call.tensors[0], tensors.ANGLE)
        if angle is not None:
            return tensors.narrow(call.op.run((angle,), {}), call.dtype)
    if call.inputs and name in op_lists.MOVES:
        return _copied(call, call.dtype, is_weight=False)
    if call.weights:
        return with_weights(call)
    if name in ("take", "get_item") and _takes_rows(call):
        table = call.tensors[0]
        wide = tapes.with_dense_gradient(tensors.to_float32(table))
        return tensors.narrow(call.run_with(wide, table), call.dtype)
    if _is_often_repeated(call):
        return tensors.narrow(call.in_float32(), call.dtype)
    return call.plain()


def _is_wide(call: Call) -> bool:
    """Returns whether an op that is on no list needs float32."""
    name, count = call.op.name, len(call.tensors)
    if name in op_lists.NARROW:
        return _sums_numbers(call)
    wanted = call.wanted()
    if wanted not in (None, call.dtype):
        return True
    if name == "multiply" and count == 2:
        # A square leaves float16's range, and other products need not.
        if call.tensors[0] is call.tensors[1]:
            return True
    if name in op_lists.TAKES_VALUES and _is_unfit(call.numbers, call.dtype):
        return True
    return call.inputs == count and name in op_lists.ARITHMETIC


def cast(call: Call) -> Any:
    """Casts, and notes what becomes 16 bit."""
    if call.args and isinstance(call.args[0], keras.Variable):
        # A variable that is cast is a snapshot.
        call.args = (keras_variables.read(call.args[0]), *call.args[1:])
    call.look()
    given, dtype = call.args[0] if call.args else None, call.wanted()
    if any(call.copies) and dtype in (None, call.dtype):
        return call.plain()
    result = decide(call)
    if dtype in _formats.SIXTEEN_BIT and call.wide and call.wide[0] is given:
        tensors.put_note(result, tensors.ANGLE, given)
    return result


def assigning(original: Callable, exactly: Callable) -> Callable:
    """Returns what assigns to a variable: 16-bit values by `exactly`.

    Args:
        original: Keras's method.
        exactly: Takes this, the variable and the value.
    """

    @functools.wraps(original)
    def assign(self: Any, value: Any) -> Any:
        kind: Any = type(value)
        dtype = tensors.known_dtype(kind, getattr(value, "dtype", None))
        if dtype in _formats.SIXTEEN_BIT:
            return exactly(original, self, value)
        return original(self, value)

    return assign


def noting_weights(original: Callable) -> Callable:
    """Returns what casts a variable for a layer that reads it.

    The 16-bit copy knows the float32 tensor that the variable is read as.
    """

    @functools.wraps(original)
    def maybe_cast(self: Any, value: Any) -> Any:
        if (
            self.dtype not in _formats.SIXTEEN_BIT
            # Copies of symbols get no notes, so that ops leave them to Keras.
            or context.on_shapes_only()
            or tensors.float_dtype(value) != "float32"
        ):
            return original(self, value)
        # The variable is read once, as the tensor that is then copied.
        weight = value.value() if hasattr(value, "read_value") else value
        copy = tensors.cast(weight, self.dtype)
        return tensors.noted_copy(weight, copy, is_weight=True)

    return maybe_cast


def _in_float32(call: Call) -> Any:
    """Computes in float32; what is 16 bit by list or by wish is rounded."""
    result, wanted = call.in_float32(), call.wanted()
    if wanted in _formats.SIXTEEN_BIT:
        return tensors.narrow(result, wanted)
    if _block().in_loop and not _casts_in_each_step():
        # A recurrent layer keeps what each step computes for the gradient.
        return tensors.narrow(result, call.dtype)
    given = call.args[0] if call.args else next(iter(call.kwargs.values()))
    if call.op.name in op_lists.INSIDE and tensors.is_16_bit(given):
        # Statistics beside the input may be float32.
        return tensors.narrow(result, call.dtype)
    return result


def _casts_in_each_step() -> bool:
    """Returns whether TensorFlow's kernels compute a recurrent layer's step.

    They cast each tensor on its own, so few are cast.
    """
    return _block().in_loop and context.in_graph_without_xla()


def _of_weights(call: Call) -> Any:
    """Computes in float32; the result is a weight again.

    It is a 16-bit copy where the op would return 16 bit.
    """
    is_wide = len(call.wide) > 0 or (
        call.is_ruled and call.op.name not in op_lists.INSIDE
    )
    is_wide = is_wide or _is_wide(call)
    dtype = call.wanted() or ("float32" if is_wide else call.dtype)
    if call.op.name in op_lists.MOVES and context.in_graph_without_xla():
        # One cast for each weight, not for each of its parts.
        noted = functools.partial(tensors.noted_copy, is_weight=True)
        return keras.tree.map_structure(noted, call.in_float32(), call.plain())
    return _copied(call, dtype, is_weight=True)


def _copied(call: Call, dtype: str, is_weight: bool) -> Any:
    """Computes in float32, and returns copies of the result."""

    def copied(value: Any) -> Any:
        if tensors.float_dtype(value) != "float32":
            return value
        copy = tensors.narrow(value, dtype)
        return tensors.noted_copy(value, copy, is_weight)

    return tensors.map_leaves(call.in_float32(), copied)


def _narrow(call: Call) -> None:
    """Gives a call 16-bit copies of what is float32."""

    def copy(value: Any) -> Any:
        narrowed = tensors.narrow(value, call.dtype)
        if narrowed is value or tensors.weight_of(value) is None:
            return narrowed
        return tensors.noted_copy(value, narrowed, is_weight=True)

    call.args, call.kwargs = tensors.map_leaves((call.args, call.kwargs), copy)
    call.look()


def with_weights(call: Call) -> Any:
    """Computes with weights beside 16-bit inputs; returns 16 bit.

    With one weight and one input, the gradient of the weight is float32.
    """
    if call.wide:
        _narrow(call)
    name = call.op.name
    if not call.weights or name in op_lists.JOINS:
        return call.plain()
    is_product = name in op_lists.NARROW
    is_known = is_product or name in ("add", "subtract", "multiply")
    is_pair = len(call.tensors) == 2 and call.weights == 1
    if not is_pair or not is_known or _block().in_map:
        return tensors.narrow(call.in_float32(), call.dtype)
    if _ON_TENSORFLOW:
        is_asked = tapes.may_be_asked()
    else:
        # JAX forms gradients by tracers only.
        is_asked = any(isinstance(x, context.TRACER) for x in call.tensors)
    if call.multiply is None and not is_asked:
        return call.plain()
    first = call.copies[0]
    place = 0 if first and first.is_weight else 1
    copy, inputs = call.tensors[place], call.tensors[1 - place]
    noted, equation = call.copies[place], _equation(call, place)
    weight = noted and noted.source
    if call.multiply is not None and equation:
        result = call.multiply(inputs, weight, equation)
        if result is not None:
            return result
    if not is_asked:
        return call.plain()
    factors = call.of_two(inputs, copy), inputs, weight, copy
    if name in op_lists.CONVOLUTIONS:
        return products.convolved(*factors)
    if is_product:
        return products.contracted(*factors, equation)
    if name == "multiply":
        return products.multiplied(*factors)
    second = -1 if name == "subtract" else 1
    signs = (1, second) if place else (second, 1)
    return products.added(*factors, signs)


def _equation(call: Call, place: int) -> str:
    """Returns the einsum that a product with a weight is, "" if unknown."""
    first = call.args[0] if call.args else None
    if call.op.name == "einsum" and isinstance(first, str):
        return first if place == 1 else ""
    ranks = [*map(_rank, call.tensors)]
    is_rows = call.op.name == "matmul" and place == 1 and ranks[1] == 2
    return op_lists.ROWS if is_rows and ranks[0] != 1 else ""


def _made(call: Call) -> Any:
    """Computes an op without 16-bit tensors, which may make one of a number.

    A number that the format cannot hold stays float32.
    """
    name, dtype = call.op.name, call.wanted()
    if dtype not in _formats.SIXTEEN_BIT:
        return call.plain()
    if name == "arange":
        # TensorFlow's graphs count in float32 only.
        result, counts = call.in_float32(), [*call.args, *call.kwargs.values()]
        exact_up_to = 2 / _formats.LIMITS[dtype].epsilon
        # What is no number, but a tensor, may be any number.
        is_exact = all(
            isinstance(x, str | None) or _is_number(x) and abs(x) <= exact_up_to
            for x in counts
        )
        return tensors.narrow(result, dtype) if is_exact else result
    if name in op_lists.TAKES_VALUES and _is_unfit(call.numbers, dtype):
        return call.in_float32()
    return call.plain()


def _is_unfit(numbers: list, dtype: str) -> bool:
    """Returns whether a number would be infinite, or zero, in a format."""
    limits = _formats.LIMITS[dtype]
    return any(
        limits.max < abs(number) < math.inf
        # Half of the smallest number rounds to zero.
        or 0 < abs(number) <= limits.smallest / 2
        for number in numbers
    )


def _sums_numbers(call: Call) -> bool:
    """Returns whether a product sums number by number, as one of vectors.

    No matrix is multiplied then, and each result is a sum over many terms.
    """
    name, first = call.op.name, call.args[0] if call.args else None
    if name == "einsum" and isinstance(first, str):
        before, arrow, after = first.partition("->")
        alone = {x for x in before if x.isalpha() and before.count(x) == 1}
        # Each axis of a product of matrices has two places.
        return bool(arrow) and (not alone or bool(alone - {*after}))
    ranks = [*map(_rank, call.tensors)]
    return name in ("matmul", "dot", "inner") and ranks == [1, 1]


def _rank(tensor: Any) -> int | None:
    """Returns the number of axes, `None` where TensorFlow does not know."""
    shape = tensor.shape
    return None if getattr(shape, "rank", 0) is None else len(shape)


def _takes_rows(call: Call) -> bool:
    """Returns whether an op may take a row several times.

    The gradient of the row is then a sum. Slices take each part once.
    """
    key = call.args[1] if len(call.args) > 1 else None
    parts = key if isinstance(key, tuple) else (key,)
    by_array = any(isinstance(x, tensors.ARRAYS) and x.ndim for x in parts)
    return (by_array or call.op.name == "take") and tapes.may_be_asked()


def _is_often_repeated(call: Call) -> bool:
    """Returns whether the gradient of a 16-bit tensor is a 16-bit sum of many.

    TensorFlow's kernels of a CPU sum in 16 bit, as for the gate of a
    squeeze-and-excite block. XLA and GPUs round the sum.
    """
    if not _ON_TENSORFLOW or len(call.tensors) < 2:
        return False
    if call.op.name in op_lists.JOINS or None in map(_rank, call.tensors):
        return False
    # An axis of unknown length is long.
    sizes = [math.prod(n or _FEW + 1 for n in x.shape) for x in call.tensors]
    is_often = max(sizes) > _FEW * min(sizes)
    return is_often and not (
        context.by_xla() or context.for_gpu(call.tensors[0])
    )
