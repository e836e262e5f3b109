"""Stores the state of an optimizer in 8 bits."""

import collections
import contextlib
import functools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras import ops

from tfmix._keras import optimizers, replacing, variables
from tfmix.optimizers import eight_bit

# Sums and averages over many steps stay in float32. So does state from which
# weights are computed in each step, because rounding it would round them.
_WIDE = ("average", "gradient_accumulator")
_WEIGHTS = {"ScheduleFreeAdamW": "momentum", "Ftrl": "linear"}
# Second moments are never negative. Keras's optimizers give them these names.
_SECOND_MOMENTS = re.compile("velocity|accumul|norm|squared")
# Variables with fewer elements save too little memory, and so do those with
# rows that are shorter, such as vectors: a scale takes four bytes. Embeddings,
# which have this in their paths, have gradients that differ most from row to
# row.
SMALL, SHORT, _RARE = 4096, 32, "embedding"


def keeps_float32(variable: keras.Variable) -> bool:
    """Returns whether a variable's state stays in float32."""
    # The names of the layer and the variable count, not the model's.
    names = variable.path.split("/")[-2:]
    is_small = math.prod(variable.shape) < SMALL
    is_short = math.prod(variable.shape[1:]) < SHORT
    return is_small or is_short or any(_RARE in name for name in names)


def _stays_wide(optimizer: Any, name: str | None) -> bool:
    """Returns whether an optimizer's state of this name is never rounded."""
    kinds = [kind.__name__ for kind in type(optimizer).__mro__]
    return name in _WIDE or any(_WEIGHTS.get(kind) == name for kind in kinds)


def _check(optimizer: Any) -> None:
    """Raises an error for an optimizer whose moments cannot be rounded."""
    if getattr(optimizer, "centered", False):
        raise ValueError(
            "The state of RMSprop(centered=True) cannot be rounded: it "
            "subtracts the square of one moment from the other, and takes the "
            f"root. Received: inner_optimizer={optimizer.name!r}, with "
            "centered=True. Write RMSprop(centered=False)."
        )
    kind = type(optimizer)
    if kind.update_step.__module__.split(".")[0] != "keras":
        raise ValueError(
            "Only Keras's optimizers can have state in 8 bits: of others it is "
            "not known which moments are never negative. Received: "
            f"inner_optimizer={optimizer.name!r} of type {kind.__name__}, with "
            "an `update_step` of its own. Leave out LowMemoryOptimizer."
        )


def _code(optimizer: Any, name: str) -> eight_bit.Code:
    """Returns the 8-bit format for a moment."""
    if _SECOND_MOMENTS.search(name):
        return eight_bit.UNSIGNED
    is_lion = isinstance(optimizer, keras.optimizers.Lion)
    return eight_bit.SIGNS if is_lion else eight_bit.SIGNED


@contextlib.contextmanager
def creating(
    optimizer: optimizers.Optimizer,
    draw: Callable[[tuple[int, ...], int, Any], Any],
) -> Iterator[None]:
    """A context in which an optimizer that is built has its state in 8 bits.

    Args:
        optimizer: The optimizer.
        draw: Function of a shape, a stream and an offset of the seed; it
            returns the noise of the current step.
    """
    with contextlib.ExitStack() as undo:
        for worker in optimizers.workers(optimizer):
            _narrow(undo, worker, draw)
        yield


def _narrow(
    undo: contextlib.ExitStack,
    worker: Any,
    draw: Callable[[tuple[int, ...], int, Any], Any],
) -> None:
    """Makes an optimizer round its state until a stack unwinds.

    State that is not shaped like its variable, such as Adafactor's rows and
    columns, stays in float32.
    """
    _check(worker)
    slots_of: collections.Counter[int] = collections.Counter()
    original = worker.add_variable_from_reference

    def add(
        reference_variable: keras.Variable,
        name: str | None = None,
        initializer: Any = "zeros",
    ) -> keras.Variable:
        key = id(reference_variable)
        if _stays_wide(worker, name) or keeps_float32(reference_variable):
            return original(reference_variable, name, initializer)
        # Each slot of a variable is rounded with its own noise. Slots of
        # different variables share theirs, so that one kernel serves all
        # variables of a shape. Views use streams from 0 on.
        slots_of[key] += 1
        stream = -slots_of[key]

        def noise(shape: tuple[int, ...], offset: Any) -> Any:
            return draw(shape, stream, offset)

        state = _make(
            worker, reference_variable, name or "var", initializer, noise
        )
        # What the view stores is tracked already. Removing that from the
        # list of tracked variables would stop TensorFlow from saving it.
        optimizers.count_as_tracked(worker, state)
        return state

    replacing.swap(undo, worker, "add_variable_from_reference", add)


def _make(
    worker: Any,
    variable: keras.Variable,
    name: str,
    initializer: Any,
    noise: Callable[[tuple[int, ...], Any], Any],
) -> "_Slot":
    shape, code = tuple(variable.shape), _code(worker, name)
    path = f"{variable.path.replace('/', '_')}_{name}"
    codes = worker.add_variable(
        shape=shape,
        initializer="zeros",
        dtype=code.dtype,
        name=path,
        **variables.placement(variable),
    )
    sizes = worker.add_variable(
        shape=eight_bit.blocks_shape(shape),
        initializer="zeros",
        dtype="float32",
        name=f"{path}_sizes",
        **variables.on_each_device(variable),
    )
    slot = _Slot(codes, sizes, code, noise)
    first = keras.initializers.get(initializer)
    # The codes of zeros are zeros. Encoding them would compile each operation.
    if not isinstance(first, keras.initializers.Zeros):
        value = ops.cast(first(shape, "float32"), "float32")
        slot.set(*eight_bit.encode(value, code, eight_bit.NEAREST))
    return slot


class _Slot(variables.Float32View):
    """A float32 slot that is stored as codes and sizes of blocks.

    Reading an assigned value returns it rounded, also within the same step. So
    the kernel that updates a weight does not read the old codes, and the new
    ones replace them without a copy.
    """

    def __init__(
        self,
        codes: keras.Variable,
        sizes: keras.Variable,
        code: eight_bit.Code,
        noise: Callable[[tuple[int, ...], Any], Any],
    ) -> None:
        super().__init__(codes)
        self.sizes, self.code, self.noise = sizes, code, noise

    def load(self) -> Any:
        """Returns the float32 value as a tensor."""
        codes, sizes = map(ops.convert_to_tensor, (self.stored, self.sizes))
        return eight_bit.decode(codes, sizes, self.code)

    def store(self, value: Any) -> None:
        """Stores a float32 tensor, rounded stochastically."""
        noise = functools.partial(self.noise, tuple(value.shape))
        self.set(*eight_bit.encode(value, self.code, noise))

    def set(self, codes: Any, sizes: Any) -> None:
        """Sets what is stored."""
        self.stored.assign(codes)
        self.sizes.assign(sizes)
