"""Unscales and checks gradients, and applies the step or skips it.

TensorFlow's graphs use a conditional, which saves the work of a skipped step.
Under XLA and JAX each value is selected as soon as it is assigned. An update
kernel can select, too, whereas a conditional would make a GPU wait for the
host.
"""

import collections
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from tfmix._keras import context, kernels, optimizers
from tfmix._keras import variables as keras_variables
from tfmix.ops import tensors
from tfmix.step import replicas

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf
else:
    import jax
    from jax.experimental import sparse

# Operations that only explain why a gradient is not finite run for gradients of
# at most this size. XLA fuses them, so it has no limit.
_SMALL = 4096


def all_finite(tensors: Any) -> Any:
    """Returns whether no tensor holds an infinity or a NaN.

    Reads each tensor once and copies nothing to the host. Sparse gradients
    (`tf.IndexedSlices`, JAX's `BCOO`) are finite if the magnitudes of their
    values have a finite sum, so that no row overflows when it is summed.

    Args:
        tensors: A tensor, or any nest of lists, tuples and dicts of tensors
            and `None`s, of any shape and dtype. Integers count as finite.

    Returns:
        A boolean scalar tensor; true for an empty nest.

    Examples:
        >>> bool(all_finite({"a": [1.0, 2.0], "b": None}))
        True
        >>> bool(all_finite([1.0, float("inf")]))
        False
    """
    leaves = [
        ops.convert_to_tensor(leaf) if values(leaf) is leaf else leaf
        for leaf in tree.flatten(tensors)
        if leaf is not None
    ]
    return ops.logical_not(ops.any(not_finite(leaves)))


def not_finite(tensors: Sequence) -> Any:
    """Returns a boolean vector, true for each tensor that is not finite.

    Under XLA, one kernel reads several tensors of one shape, so a model with
    hundreds of variables needs a few.
    """
    if not tensors:
        # The model is frozen, or has no weights.
        return ops.zeros((0,), "bool")
    # The rules of a model's step only cost time here.
    with context.holding(rules=context.NO_RULES):
        tensors = [*map(_dense, tensors)]
        if context.by_xla():
            return _not_finite_by_shape(tensors)
        all_fine = [tensor is None or is_finite(tensor) for tensor in tensors]
        return ops.logical_not(ops.stack(all_fine))


def _not_finite_by_shape(tensors: list) -> Any:
    """Returns the flags of all tensors, computed for each shape together."""
    groups: dict[Any, dict[int, Any]] = collections.defaultdict(dict)
    for n, tensor in enumerate(tensors):
        groups[n if _is_apart(tensor) else tuple(tensor.shape)][n] = tensor
    # A number stands for a tensor that is apart.
    parts = [
        _not_finite_apart(*group.values())
        if isinstance(shape, int)
        else kernels.not_finite_alike(*group.values())
        for shape, group in groups.items()
    ]
    order = [*itertools.chain(*groups.values())]
    joined = ops.concatenate(parts)
    in_order = order == sorted(order)
    return joined if in_order else ops.take(joined, np.argsort(order))


def _not_finite_apart(tensor: Any) -> Any:
    """Returns the flag of a tensor that is apart, as a vector."""
    fine = tensor is None or is_finite(tensor)
    return ops.reshape(ops.logical_not(fine), (1,))


def is_finite(tensor: Any) -> Any:
    """Returns a boolean scalar tensor: whether all numbers are finite."""
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    if dtype.startswith("complex"):
        parts = ops.real(tensor), ops.imag(tensor)
        return ops.logical_and(*map(is_finite, parts))
    if not is_float(tensor):
        return ops.convert_to_tensor(True)
    if keras.backend.backend() == "tensorflow":
        # Keras's ops take three times as long in an eager step.
        rank = tf.convert_to_tensor(tensor).shape.rank
        axes = (
            tf.range(tf.rank(tensor))
            if rank is None
            else np.arange(rank, dtype="int32")
        )
        return tf.raw_ops.All(input=tf.raw_ops.IsFinite(x=tensor), axis=axes)
    return ops.all(ops.isfinite(tensor))


def _is_apart(tensor: Any) -> bool:
    """Returns whether no kernel can read a tensor together with others."""
    if tensor is None or None in tensor.shape:
        return True
    return not is_float(tensor)


def _dense(tensor: Any) -> Any:
    """Returns a dense tensor unchanged, and a number for a sparse one."""
    found = values(tensor)
    if found is tensor:
        return tensor
    # The optimizer sums the values of a row. No partial sum exceeds the sum of
    # all magnitudes.
    return ops.sum(ops.abs(tensors.to_float32(found)))


def apply_step(
    optimizer: Any,
    grads: Sequence,
    variables: Sequence,
    update: Callable[[list, list], Any],
    *,
    assigned: Sequence,
    counters: Sequence,
    count: Callable[[Any, Any, list], None],
    scale: Any = None,
    checks_unscaled: bool = False,
) -> Any:
    """Sums gradients over replicas, checks them, and updates or skips.

    Args:
        optimizer: The optimizer whose step it is.
        grads: One gradient for each of the variables; `None` where there is
            none.
        variables: The variables. One may occur twice: two networks that share
            a trunk may each give a gradient for its variables.
        update: Applies unscaled float32 gradients to a replica's variables.
        assigned: All variables that `update` may assign to.
        counters: The variables that `count` may assign to besides.
        count: Gets whether the step was applied, a flag for each variable of
            the optimizer whose gradient was not finite, and the gradients,
            summed over replicas.
        scale: The loss scale by which gradients are divided; `None` if they
            are unscaled already.
        checks_unscaled: Whether unscaled gradients may be infinite where the
            summed ones are not.

    Returns:
        Whether the step was applied: a bool, or a boolean scalar tensor.

    Raises:
        ValueError: If JAX is compiling, and was not given the variables.
    """
    if keras_variables.becomes_constant(optimizers.applies(optimizer)):
        raise ValueError(
            "`apply` cannot assign variables inside a function that JAX "
            "compiles. Write `optimizer.stateless_apply("
            "optimizer_variables, grads, trainable_variables)` there."
        )
    summed = replicas.sum_gradients(grads, variables)
    with (
        replicas.one_replica([*assigned, *counters], optimizer),
        # Gradients are float32 from here on, and an optimizer computes in the
        # dtypes of its variables: the rules of a model's step would only cost
        # time, and check the gradients again.
        context.holding(rules=context.NO_RULES),
    ):
        true = unscaled(summed, variables, scale)
        local = [*map(keras_variables.local, variables)]
        # Fewer bytes are read before 16-bit gradients become float32.
        applied, bad = apply_if_finite(
            true if checks_unscaled else summed,
            functools.partial(update, true, local),
            assigned,
        )
        bad = by_variable(bad, optimizer, variables)
        count(applied, bad, summed)
    return applied


def apply_if_finite(
    grads: Sequence, update: Callable[[], Any], variables: Sequence
) -> tuple[Any, Any]:
    """Runs an update if all gradients are finite; else nothing changes.

    Args:
        grads: Gradients, dense or sparse; `None` where there is none.
        update: Assigns to the variables. Under XLA and JAX it always runs.
        variables: All variables that it may assign to.

    Returns:
        Whether it was applied: a bool where that is known already, else a
        boolean scalar tensor. Also a boolean vector: which gradients are not
        finite.
    """
    bad = _bad_of_step(list(grads))
    applied, is_selected = _decided(ops.logical_not(ops.any(bad)))
    if is_selected:
        with keras_variables.selecting(applied, variables):
            update()
    else:
        _branch(applied, update, None)
    return applied, bad


def restore_unless(applied: Any, pairs: Sequence[tuple[Any, Any]]) -> None:
    """Restores the values of variables, unless a step was applied.

    Args:
        applied: Bool or boolean scalar tensor.
        pairs: The variables that were `written`, each with its value before the
            step.
    """

    def restore(stays: Any = False) -> None:
        for variable, old in pairs:
            new = keras_variables.read(variable)
            variable.assign(keras_variables.select(stays, new, old))

    applied, is_selected = _decided(applied)
    if is_selected:
        restore(applied)
    elif pairs:
        _branch(applied, None, restore)


def either(condition: Any, function: Callable[[], Any]) -> Any:
    """Returns a condition, or a function's result where it is false.

    Args:
        condition: Bool or boolean scalar tensor.
        function: Returns a bool or boolean scalar tensor, and changes nothing.
    """
    condition, is_selected = _decided(condition)
    if is_selected:
        return ops.logical_or(condition, function())
    return _branch(condition, None, function)


def written(pairs: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Returns the variables that may have a new value by now.

    The others are left alone, because XLA would copy each.
    """
    return [pair for pair in pairs if keras_variables.may_differ(*pair)]


def by_variable(bad: Any, optimizer: Any, variables: Sequence) -> Any:
    """Joins the flags of all gradients of each variable.

    Args:
        bad: Boolean vector, a flag for each gradient.
        optimizer: The optimizer that gets the gradients.
        variables: The variable of each gradient.

    Returns:
        Boolean vector, a flag for each variable the optimizer was built with.
    """
    every = np.arange(len(optimizers.remembered(optimizer)))
    rows = optimizers.positions(optimizer, variables)
    if np.array_equal(rows, every):
        return bad
    is_row = np.equal.outer(every, rows)
    return ops.any(ops.logical_and(is_row, bad), axis=1)


def _decided(condition: Any) -> tuple[Any, bool]:
    """Returns what is `known` of a condition, and how it decides.

    Values are selected by it, without a branch, if the second is true.
    """
    condition = known(condition)
    return condition, not isinstance(condition, bool) and context.by_xla()


def _branch(
    condition: Any, if_true: Callable | None, if_false: Callable | None
) -> Any:
    """Runs one of two functions; returns its result, `True` for nothing."""

    def run(function: Callable | None) -> Any:
        result = None if function is None else function()
        return True if result is None else result

    if isinstance(condition, bool):
        return run(if_true if condition else if_false)
    return tf.cond(
        condition,
        functools.partial(run, if_true),
        functools.partial(run, if_false),
    )


def known(condition: Any) -> Any:
    """Returns a condition, as a bool if the code runs op by op."""
    if isinstance(condition, bool):
        return condition
    return condition if context.is_symbolic(condition) else bool(condition)


def unscaled(grads: Sequence, variables: Sequence, scale: Any = None) -> list:
    """Returns gradients, dense or sparse, in float32, divided by the scale.

    A value that overwrites its variable stays unchanged.

    Args:
        grads: The gradients; `None` where there is none.
        variables: The variable of each.
        scale: The loss scale; `None` if they are unscaled already.
    """

    # All gradients share the scalars, because each operation takes time to
    # compile.
    @functools.cache
    def reciprocal(dtype: Any) -> Any:
        return 1.0 / ops.cast(scale, dtype)

    result, kept = list(grads), map(keras_variables.is_overwritten, variables)
    rest = [n for n, is_kept in enumerate(kept) if not is_kept]
    rest = [n for n in rest if grads[n] is not None]
    wide = [*map(tensors.to_float32, [values(grads[n]) for n in rest])]
    for n, tensor in zip(rest, wide, strict=True):
        # XLA repeats a product in every kernel that reads it, where a division
        # gets a kernel and a tensor of its own. It is exact for powers of two;
        # otherwise the product rounds once more.
        true = tensor if scale is None else tensor * reciprocal(tensor.dtype)
        result[n] = with_values(grads[n], true)
    return result


def without_infinities(tensor: Any) -> Any:
    """Returns a float tensor, dense or sparse, with NaN for infinity."""
    found = values(tensor)
    found = ops.where(ops.isfinite(found), found, float("nan"))
    return with_values(tensor, found)


def with_values(tensor: Any, new: Any) -> Any:
    """Returns a gradient, dense or sparse, with other `values`."""
    if values(tensor) is tensor:
        return new
    if keras.backend.backend() == "jax":
        return type(tensor)((new, tensor.indices), shape=tensor.shape)
    return type(tensor)(new, tensor.indices, tensor.dense_shape)


def keep_overflow_visible(gradients: Sequence) -> list[bool]:
    """Returns which gradients say why they are not finite.

    `blames_data` reads that from them. A model's gates return NaN for all
    gradients if an incoming gradient was not finite. An overflow inside leaves
    as infinity, or, in the other gradients, as it was computed. TensorFlow's
    own kernels would read each gradient once more for it.

    Args:
        gradients: The gradients of a model's variables, at least one.
    """
    if context.by_xla():
        return [True] * len(gradients)
    if context.trace() == context.EAGER:
        # Each operation takes as long as one of a small model.
        small = [len(x.shape) < 2 for x in gradients]
    else:
        sizes = [x.shape.num_elements() for x in gradients]
        small = [size is None or size <= _SMALL for size in sizes]
    return small if any(small) else [True] * len(gradients)


def is_small(gradient: Any) -> bool:
    """Returns whether a gradient is known to hold few numbers."""
    size = gradient.shape.num_elements()
    return size is not None and size <= _SMALL


def blames_data(
    gradients: Sequence, variables: Sequence, both: Callable
) -> Any:
    """Returns whether gradients are not finite because the loss was not.

    One number of a gradient that shows the reason is enough.

    Args:
        gradients: Gradients of a model that scales them; `None` where there is
            none.
        variables: The variable of each.
        both: Function of what the first and the last gradient say.

    Returns:
        Boolean scalar tensor; `False` if there is no gradient.
    """
    kept = map(keras_variables.is_overwritten, variables)
    pairs = zip(gradients, [*kept], strict=True)
    numbers = [x for x, is_kept in pairs if x is not None and not is_kept]
    numbers = [x for x in map(values, numbers) if 0 not in tuple(x.shape)]
    says_why = keep_overflow_visible(numbers)
    numbers = [*itertools.compress(numbers, says_why)]
    if not numbers:
        return False
    # The first variable gets gradients from everything after it. The last one
    # may belong to the one head whose loss is not finite. Scalars fuse with the
    # update of the rule, so they add no kernel. If the gradient were flattened
    # first, a TPU would copy all of it.
    first, last = [
        ops.isnan(ops.reshape(value[(slice(1),) * len(value.shape)], ()))
        for value in (numbers[0], numbers[-1])
    ]
    return both(first, last)


def is_float(tensor: Any) -> bool:
    """Returns whether a tensor or variable holds real floats."""
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    return keras.backend.is_float_dtype(dtype)


def values(tensor: Any) -> Any:
    """Returns the values of a sparse tensor, and a dense one unchanged."""
    if keras.backend.backend() == "jax":
        return tensor.data if isinstance(tensor, sparse.BCOO) else tensor
    return tensor.values if isinstance(tensor, tf.IndexedSlices) else tensor


def _flags(grads: list) -> Any:
    # If XLA could look through the flags, it might order a step so that it
    # needs more memory.
    return kernels.kept_apart(not_finite(grads))


# It is compiled even for eager steps, where every operation costs time.
_bad_of_step = (
    jax.jit(_flags) if keras.backend.backend() == "jax" else not_finite
)
