"""Updates that pass over memory once instead of three times, bit for bit.

Optimizers change a variable by a product, `m += (g - m) * 0.1`, or by a
quotient, `w -= m * rate / (sqrt(v) + epsilon)`. TensorFlow writes the result
of each operation to memory and the next one reads it from there. Two of its
training operations compute just these in one pass, rounding after every
operation as the single ones do: `ResourceApplyGradientDescent`, and
`ResourceApplyAdagradV2` if it leaves its accumulator alone. They stand in
for the last operations of an update that has such a form, whichever optimizer
it belongs to; TensorFlow drops what has no reader left.

For steps that TensorFlow runs operation by operation on a CPU. XLA fuses
operations itself, and on a GPU the two contract products with sums.

Reads `inputs` of operations that Keras has traced. Checked on TensorFlow 2.20
and 2.21, with Keras 3.12.4 and 3.15.1.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfmix._keras import attributes, compilation, optimizers


@contextlib.contextmanager
def updates(optimizer: Any) -> Iterator[None]:
    """Lets an optimizer write its variables in one pass where it can.

    Args:
        optimizer: The Keras optimizer that the code inside calls. One whose
            class writes variables in a way of its own stays as it is.
    """
    with contextlib.ExitStack() as undo:
        if not tf.executing_eagerly() and not compilation.by_xla():
            for each in optimizers.with_nested(optimizer):
                if _writes_as_keras_does(each):
                    own = _Updates(each)
                    attributes.swap(undo, each, "assign_add", own.add)
                    attributes.swap(undo, each, "assign_sub", own.subtract)
        yield


def _writes_as_keras_does(optimizer: Any) -> bool:
    return all(
        getattr(type(optimizer), name)
        is getattr(keras.optimizers.Optimizer, name)
        and name not in vars(optimizer)
        for name in ("assign_add", "assign_sub")
    )


class _Updates:
    """What stands in for an optimizer's `assign_add` and `assign_sub`."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._negatives: dict[Any, tf.Tensor] = {}

    def add(self, variable: Any, value: Any) -> None:
        """Adds a tensor to a variable."""
        target = _tensorflow_variable(variable)
        product = _product(value) if _fits(value, target) else None
        negative = self._negative(product[1]) if product else None
        if product and negative is not None:
            _subtract_product(target, product[0], negative)
        else:
            type(self._optimizer).assign_add(self._optimizer, variable, value)

    def subtract(self, variable: Any, value: Any) -> None:
        """Subtracts a tensor from a variable."""
        target = _tensorflow_variable(variable)
        fits = _fits(value, target)
        if fits and (product := _product(value)):
            _subtract_product(target, *product)
        elif fits and (quotient := _quotient(value, target)):
            _subtract_quotient(target, *quotient)
        else:
            type(self._optimizer).assign_sub(self._optimizer, variable, value)

    def _negative(self, number: tf.Tensor) -> tf.Tensor | None:
        # Constants only, which variables share: what is computed for each
        # would be computed, negated, for each once more.
        static = tf.get_static_value(number)
        if static is None:
            return None
        key = (tf.compat.v1.get_default_graph(), number.dtype, static.item())
        if key not in self._negatives:
            self._negatives[key] = tf.constant(-static)
        return self._negatives[key]


def _subtract_product(
    variable: tf.Variable, tensor: tf.Tensor, number: tf.Tensor
) -> None:
    tf.raw_ops.ResourceApplyGradientDescent(
        var=variable.handle, alpha=number, delta=tensor, use_locking=True
    )


def _subtract_quotient(
    variable: tf.Variable,
    tensor: tf.Tensor,
    number: tf.Tensor,
    handle: tf.Tensor,
    epsilon: tf.Tensor,
) -> None:
    tf.raw_ops.ResourceApplyAdagradV2(
        var=variable.handle,
        accum=handle,
        lr=number,
        epsilon=epsilon,
        grad=tensor,
        use_locking=True,
        update_slots=False,
    )


def _tensorflow_variable(variable: Any) -> Any:
    return variable.value if isinstance(variable, keras.Variable) else variable


def _fits(value: Any, variable: Any) -> bool:
    """Returns whether a traced tensor may change a variable in one pass."""
    return (
        isinstance(variable, tf.Variable)
        and tf.is_symbolic_tensor(value)
        and value.graph is tf.compat.v1.get_default_graph()
        and value.dtype == variable.dtype
        and value.shape.is_fully_defined()
        and value.shape == variable.shape
        and tf.DeviceSpec.from_string(variable.device).device_type == "CPU"
    )


def _product(value: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor] | None:
    """Returns the tensor and the number that it is the product of."""
    if value.op.type != "Mul":
        return None
    tensor, number = value.op.inputs
    if number.shape.rank != 0:
        tensor, number = number, tensor
    if number.shape.rank != 0 or tensor.shape != value.shape:
        return None
    # TensorFlow joins constant factors, which rounds in another way.
    is_chain = tensor.op.type in ("Mul", "RealDiv")
    if is_chain and tf.get_static_value(number) is not None:
        return None
    return tensor, number


def _quotient(value: tf.Tensor, variable: Any) -> tuple | None:
    """Returns what `tensor * number / (sqrt(other) + epsilon)` consists of.

    Returns:
        The tensor, the number, the other variable's handle and epsilon.
    """
    if value.op.type != "RealDiv":
        return None
    above, below = value.op.inputs
    product = _product(above) if above.shape == value.shape else None
    if not product or below.op.type != "AddV2":
        return None
    root, epsilon = below.op.inputs
    if root.op.type != "Sqrt" or epsilon.shape.rank != 0:
        return None
    # Without epsilon TensorFlow would multiply by the reciprocal root.
    if not tf.get_static_value(epsilon):
        return None
    (other,) = root.op.inputs
    if other.op.type != "ReadVariableOp" or other.shape != value.shape:
        return None
    (handle,) = other.op.inputs
    if handle is value.graph.capture(variable.handle):
        return None
    return (*product, handle, epsilon) if _is_current(other.op) else None


def _is_current(read: tf.Operation) -> bool:
    """Returns whether nothing has written a variable since it was read."""
    (handle,) = read.inputs
    for operation in reversed(read.graph.get_operations()):
        if operation is read:
            return True
        if operation.type != "ReadVariableOp" and any(
            each is handle for each in operation.inputs
        ):
            return False
    return False
