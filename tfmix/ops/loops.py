"""Casts, and ops that run a function of their caller.

A value that a loop carries from step to step is a sum over its steps. So it is
float32, whatever it begins with.
"""

from collections.abc import Callable
from typing import Any

import keras

from tfmix._keras import context_values
from tfmix._keras import variables as keras_variables
from tfmix.ops import apply, exact_values, tensors

_ON_TENSORFLOW = keras.backend.backend() == "tensorflow"


def scan(call: apply.Call) -> Any:
    """Runs `ops.scan`, whose first argument returns a carry and a result."""
    step, initial = _arguments(call, "f", "init")

    def wide_step(carry: Any, x: Any) -> Any:
        carry, result = step(carry, x)
        # Keras's TensorFlow collects results in arrays of the carry's dtype.
        return _wide(carry), _wide(result) if _ON_TENSORFLOW else result

    return _with_arguments(call, f=wide_step, init=_wide(initial))


def fori_loop(call: apply.Call) -> Any:
    """Runs `ops.fori_loop`."""
    step, initial = _arguments(call, "body_fun", "init_val")

    def wide_step(n: Any, carry: Any) -> Any:
        return _wide(step(n, carry))

    return _with_arguments(call, body_fun=wide_step, init_val=_wide(initial))


def while_loop(call: apply.Call) -> Any:
    """Runs `ops.while_loop`."""
    step, initial = _arguments(call, "body", "loop_vars")

    def wide_step(*carries: Any) -> Any:
        return _wide(step(*carries))

    return _with_arguments(call, body=wide_step, loop_vars=_wide(initial))


def associative_scan(call: apply.Call) -> Any:
    """Runs `ops.associative_scan`, whose elements are sums of others."""
    combine, elements = _arguments(call, "f", "elems")

    def wide_combine(one: Any, other: Any) -> Any:
        return _wide(combine(one, other))

    return _with_arguments(call, f=wide_combine, elems=_wide(elements))


def _wide(nest: Any) -> Any:
    return tensors.map_leaves(nest, _float32)


def _float32(value: Any) -> Any:
    return exact_values.float32_value(tensors.snapshot(value))


def _arguments(call: apply.Call, *names: str) -> list:
    given = call.op.by_name(call.args, call.kwargs)
    return [given[name] for name in names]


def _with_arguments(call: apply.Call, **values: Any) -> Any:
    given = call.op.by_name(call.args, call.kwargs)
    return call.op.run((), {**given, **values})


def vectorized_map(call: apply.Call) -> Any:
    """Runs a function for each row, by ops that TensorFlow can convert.

    What converts them loses gradients that are not TensorFlow's own.
    """
    with context_values.holding(in_map=_ON_TENSORFLOW):
        return call.as_it_came()


def cast(call: apply.Call) -> Any:
    """Casts; from what a tensor was before another cast, if that is known."""
    if call.args and isinstance(call.args[0], keras.Variable):
        # A variable that is cast is a snapshot.
        call.args = (keras_variables.read(call.args[0]), *call.args[1:])
    call.look()
    copy = call.copies[0] if call.tensors else None
    if copy is None or copy.source is None:
        return apply.decide(call)
    value, dtype = call.tensors[0], call.wanted()
    if dtype is None or dtype == call.dtype:
        return call.plain()
    call.change(lambda x: copy.source if x is value else x)
    result = call.plain()
    if copy.is_weight and tensors.float_dtype(result):
        exact_values.weight_copy(copy.source, result)
    return result


WAYS: dict[str, Callable] = {
    "scan": scan,
    "fori_loop": fori_loop,
    "while_loop": while_loop,
    "associative_scan": associative_scan,
    "vectorized_map": vectorized_map,
    "cast": cast,
    "convert_to_tensor": cast,
}
