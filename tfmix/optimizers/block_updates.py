"""Updates some blocks of a large variable at a time, on a CPU under JAX.

Their float32 tensors fit into a cache. Those of whole variables would take new
memory in each step, and a CPU spends more time on that than on the update.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras

from tfmix._keras import global_state, kernels, optimizers, replacing
from tfmix._keras import variables as keras_variables
from tfmix.optimizers import eight_bit, elementwise

if keras.backend.backend() == "jax":
    import jax

# With more numbers at a time, caches are too small. With fewer, loops start
# more often, and more variables have one, which compiles longer.
_TOGETHER = 2**17
States = Mapping[int, Sequence[keras.Variable]]


@contextlib.contextmanager
def on_cpu(
    optimizer: optimizers.Optimizer, states: States, seed: keras.Variable | None
) -> Iterator[None]:
    """A context in which a CPU updates large variables block by block.

    Args:
        optimizer: The optimizer. Only the element-wise updates that Keras
            wrote run by blocks.
        states: The state of each variable with some in 8 bits, by its `id`.
        seed: The variable that moves the positions of `noise.noise`.
    """
    with contextlib.ExitStack() as undo:
        if states and _may_run_on_cpu():
            for worker in optimizers.workers(optimizer):
                update = functools.partial(
                    _update, worker.update_step, states, seed
                )
                # Another may change a counter, or read a variable's shape.
                if elementwise.runs_update_of(worker, elementwise.NAMES):
                    replacing.swap(undo, worker, "update_step", update)
        yield


def _may_run_on_cpu() -> bool:
    """Returns whether what is traced may run on a CPU that is one device."""
    # Devices that share a tensor would send each other its blocks.
    if keras.backend.backend() != "jax":
        return False
    return jax.default_backend() == "cpu" and jax.device_count() == 1


def _update(
    original: Callable[..., None],
    states: States,
    seed: Any,
    gradient: Any,
    variable: keras.Variable,
    learning_rate: Any,
) -> None:
    """Takes the place of an optimizer's `update_step`."""
    parts = [variable, *_parts(states.get(id(variable), ()))]
    scope, count = global_state.open_scope(), _count_blocks(parts)
    if not (scope and count and _may_cut(gradient, parts)):
        original(gradient, variable, learning_rate)
        return

    def run(gradient: Any) -> None:
        original(gradient, variable, learning_rate)

    blocks = _Blocks(run, scope, parts, seed, count)
    values = [*map(keras_variables.read, parts)]
    # The target of the program counts, which may be compiled for a GPU here.
    new = jax.lax.platform_dependent(
        gradient, *values, cpu=blocks.in_turn, default=blocks.at_once
    )
    for part, value in zip(parts, new, strict=True):
        scope.state_mapping[id(part)] = value


def _may_cut(gradient: Any, parts: Sequence[keras.Variable]) -> bool:
    """Returns whether a gradient is traced and can be cut with its variable."""
    if not isinstance(gradient, jax.core.Tracer):
        return False
    # Explicit axes would give a block another type than its tensor, and JAX
    # would not write it back.
    values = map(keras_variables.read, parts)
    return not kernels.on_explicit_axes(gradient, *values)


def _parts(states: Sequence[keras.Variable]) -> list[keras.Variable]:
    """Returns the variables in which some state is stored."""
    parts = []
    for state in states:
        is_view = isinstance(state, keras_variables.Float32View)
        parts += [state.stored, *state.beside] if is_view else [state]
    return parts


def _count_blocks(parts: Sequence[keras.Variable]) -> int:
    """Returns how many blocks the parts have; 0 if they are not cut."""
    sizes = {math.prod(part.shape) for part in parts}
    size, count = max(sizes), min(sizes)
    is_view = isinstance(parts[0], keras_variables.Float32View)
    if is_view or size < 2 * _TOGETHER or sizes != {size, count}:
        return 0
    # The last block of a vector may be shorter.
    is_whole = size % count == 0 and size // count >= eight_bit.BLOCK
    return count if is_whole else 0


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """A variable and its state, as rows of numbers that share a scale.

    Attributes:
        run: Updates them from a gradient.
        scope: The `keras.StatelessScope` that holds their values.
        parts: All variables that `run` assigns to.
        seed: The variable that moves the positions of `noise.noise`.
        count: The number of rows.
    """

    run: Callable[[Any], None]
    scope: Any
    parts: Sequence[keras.Variable]
    seed: keras.Variable
    count: int

    def at_once(self, gradient: Any, *values: Any) -> list:
        """Returns the new values."""
        with self._holding(values):
            self.run(gradient)
            return [*map(keras_variables.read, self.parts)]

    def in_turn(self, *values: Any) -> list:
        """Does what `at_once` does, with some rows at a time."""
        gradient, *state = (
            jax.numpy.reshape(value, (self.count, -1)) for value in values
        )
        rows = max(_TOGETHER // gradient.shape[1], 1)
        rest = self.count % rows
        state = jax.lax.fori_loop(
            0,
            self.count // rows,
            lambda n, state: self._step(n * rows, rows, gradient, state),
            state,
        )
        if rest:
            state = self._step(self.count - rest, rest, gradient, state)
        shapes = [part.shape for part in self.parts]
        return [*map(jax.numpy.reshape, state, shapes)]

    def _step(self, first: Any, rows: int, gradient: Any, state: list) -> list:
        """Returns the state with some rows updated."""
        new = [*state]
        cut = functools.partial(
            jax.lax.dynamic_slice_in_dim, slice_size=rows, axis=0
        )
        seed = keras_variables.read(self.seed)
        # XLA would encode again what is decoded for the weight, if it knew
        # that rows are read where they were written. A seed has 31 bits, so
        # this is 0.
        zero = jax.lax.shift_right_logical(seed, jax.numpy.int32(31))

        def assign(n: int, value: Any, **_: Any) -> Any:
            part, old = self.parts[n], new[n]
            value = jax.numpy.reshape(value, (rows, -1)).astype(old.dtype)
            # The scope may select the old value of a skipped step.
            self.scope.add_update((part, value))
            new[n] = jax.lax.dynamic_update_slice_in_dim(
                old, keras_variables.read(part), first, axis=0
            )
            self.scope.state_mapping[id(part)] = cut(new[n], first + zero)
            return value

        with (
            self._holding([cut(value, first) for value in state]),
            contextlib.ExitStack() as undo,
        ):
            # Noise depends on a number's place in the whole variable.
            place = jax.numpy.int32(gradient.shape[1]) * first
            self.scope.state_mapping[id(self.seed)] = seed + place
            for n, part in enumerate(self.parts):
                # A variable's own method would refuse the shape.
                take = functools.partial(assign, n)
                replacing.swap(undo, part, "assign", take)
            self.run(cut(gradient, first))
        return new

    @contextlib.contextmanager
    def _holding(self, values: Sequence) -> Iterator[None]:
        """A context in which the variables have these values."""
        before = self.scope.state_mapping
        ids = map(id, self.parts)
        self.scope.state_mapping = before | dict(zip(ids, values, strict=True))
        try:
            yield
        finally:
            self.scope.state_mapping = before
