"""A border around a function, under TensorFlow."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfmix._keras import compilation
from tfmix.scaling.border import power

# A function with a border: of float tensors, two lists of float tensors.
Function = Callable[..., tuple[list, list]]


def call(
    function: Function,
    tensors: Sequence,
    *,
    again: Function | None = None,
    known: Callable[[], tuple[list, list]] | None = None,
) -> tuple[list, list]:
    """Calls a function whose gradient is scaled inside and true outside.

    What enters backwards is brought to order one by a power of two that is
    found anew in each backward pass, and divided out where gradients leave:
    of tensors and of the variables that the function reads. Its own gradient
    has such a border as well; it runs the function again, once for each order.

    Args:
        function: Takes tensors; returns results, and losses that were added
            on the way, whose gradients are often far larger.
        tensors: Its arguments, float tensors.
        again: What runs the function again, without a trace of its own.
            Defaults to the function.
        known: Returns what the function returns, computed already.

    Returns:
        What the function returns.
    """
    factor = power.placing()

    @tf.custom_gradient
    def bordered(*tensors: Any) -> tuple[Any, Callable]:
        graph = compilation.trace()
        if known is not None:
            made, results = None, known()
        else:
            made = _recorded(function, tensors)
            results = made[1]

        def gradient(*upstream: Any, variables: Sequence = ()) -> Any:
            of_results, of_losses = map(len, results)
            upstream = upstream[: of_results + of_losses]
            losses = upstream[of_results:]
            by = power.of(upstream[:of_results], losses, factor)
            upstream = tuple(_times(by, each) for each in upstream)
            run = made or _recorded(function, tensors, variables)
            pull = _Pull(again or function, tensors, variables, upstream, run)
            # In another graph, that of a nested `tf.function`'s gradient, the
            # results of this one cannot be differentiated once more.
            if compilation.is_recorded() and compilation.trace() == graph:
                given = [*tensors, *upstream]
                pulled, _ = call(pull.again, given, known=pull)
            else:
                pulled = pull.dense()
            down = 1.0 / by
            found = pull.restored([_times(down, each) for each in pulled])
            count = len(tensors)
            return (found[:count], found[count:]) if variables else found

        # TensorFlow holds arguments and results together, one at least.
        return (results, [] if tensors else [tf.zeros(())]), gradient

    found: tuple[list, list] = bordered(*tensors)[0]
    for result in [*found[0], *found[1]][:1]:
        compilation.tie_gradient_to_graph(result)
    return found


class _Pull:
    """The gradients of a function: those that exist, as dense tensors."""

    def __init__(
        self,
        function: Function,
        tensors: Sequence,
        variables: Sequence,
        upstream: Sequence,
        made: tuple[tf.GradientTape | None, tuple[list, list]],
    ) -> None:
        self._function, self._variables = function, list(variables)
        self._count = len(tensors)
        self._found = self._gradients(made, tensors, upstream)
        #: The positions of the gradients that are not `None`.
        self.kept = [n for n, g in enumerate(self._found) if g is not None]

    def __call__(self) -> tuple[list, list]:
        # Read, so that a gradient of these is asked for theirs, too.
        for variable in self._variables:
            tf.convert_to_tensor(variable)
        return self.dense(), []

    def dense(self) -> list:
        """Returns the gradients that exist, those by rows as their rows."""
        return self._dense(self._found)

    def again(self, *given: Any) -> tuple[list, list]:
        """Computes the same anew, of tensors and what enters backwards."""
        tensors, upstream = given[: self._count], given[self._count :]
        made = _recorded(self._function, tensors, self._variables)
        return self._dense(self._gradients(made, tensors, upstream)), []

    def restored(self, dense: Sequence) -> list:
        """Returns gradients in the place and in the form of those found."""
        found = list(self._found)
        for place, values in zip(self.kept, dense, strict=True):
            sparse = found[place]
            if isinstance(sparse, tf.IndexedSlices):
                values = tf.IndexedSlices(
                    values, sparse.indices, sparse.dense_shape
                )
            found[place] = values
        return found

    def _gradients(
        self,
        made: tuple[tf.GradientTape | None, tuple[list, list]],
        tensors: Sequence,
        upstream: Sequence,
    ) -> list:
        tape, (results, losses) = made
        if tape is None:
            return compilation.graph_gradients(
                [*results, *losses], tensors, self._variables, upstream
            )
        sources = [*tensors, *self._variables]
        found: list = tape.gradient(
            [*results, *losses], sources, list(upstream)
        )
        return found

    def _dense(self, gradients: Sequence) -> list:
        kept = [gradients[place] for place in self.kept]
        return [getattr(each, "values", each) for each in kept]


def _recorded(
    function: Function, tensors: Sequence, variables: Sequence = ()
) -> tuple[tf.GradientTape | None, tuple[list, list]]:
    if not tf.executing_eagerly():
        return None, function(*tensors)
    # Persistent: a tape around it may be asked more than once.
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([*tensors, *variables])
        results = function(*tensors)
    return tape, results


def _times(factor: Any, tensor: Any) -> Any:
    # In float32, which holds every factor.
    if tensor.dtype == tf.float32:
        # Quick to trace, for hundreds of gradients.
        return tf.raw_ops.Mul(x=tensor, y=factor)
    wide = tf.cast(tensor, tf.float32) if tensor.dtype.size < 4 else tensor
    return tf.cast(wide * tf.cast(factor, wide.dtype), tensor.dtype)
