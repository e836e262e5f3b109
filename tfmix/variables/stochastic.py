"""Stochastic rounding of float32 to bfloat16."""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
from keras import ops

from tfmix._keras import attributes, optimizers, variables
from tfmix.variables import bits, views

# A step may assign a variable more than once (weight decay, then the update,
# then a constraint); each assignment needs bits of its own.
ASSIGNMENTS_PER_STEP = 16

# Sums and averages over many steps stay in float32.
WIDE_SLOTS = ("average", "gradient_accumulator")


def stochastic(value: Any, random_bits: Any) -> Any:
    """Rounds float32 up with the probability that makes the mean exact."""
    # The lower 16 bits of the uint32 `random_bits` decide between the two
    # neighbours. What is a bfloat16, infinite or NaN stays.
    word = bits.bitcast(bits.quiet(value), "uint32")
    noise = ops.bitwise_and(random_bits, bits.unsigned(0xFFFF))
    upper = ops.right_shift(ops.add(word, noise), bits.unsigned(16))
    return bits.bitcast(ops.cast(upper, "uint16"), "bfloat16")


def random_bits(shape: tuple, seed: Any, stream: int, step: Any) -> Any:
    """Draws uint32 numbers that depend on the arguments alone."""
    # The generator is named, so eager code, graphs and XLA agree, and so do
    # replicas. Each use within a step has its own `stream`.
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        key = tf.cast(seed, tf.int64) * 2**32 + stream
        return tf.random.stateless_uniform(
            shape,
            seed=tf.stack([key, tf.cast(step, tf.int64)]),
            minval=None,
            maxval=None,
            dtype=tf.uint32,
            alg="philox",
        )
    import jax

    key = jax.random.key(ops.convert_to_tensor(seed), impl="threefry2x32")
    key = jax.random.fold_in(jax.random.fold_in(key, stream), step)
    return jax.random.bits(key, shape, "uint32")


class StochasticView(variables.Float32View):
    """A bfloat16 variable that rounds stochastically what it is assigned."""

    def __init__(self, variable: Any, stream: int, draw: Any) -> None:
        super().__init__(variable)
        self.stream = stream * ASSIGNMENTS_PER_STEP
        self.draw, self.assignments = draw, 0

    def load(self) -> Any:
        """Returns the float32 value as a tensor."""
        return ops.cast(self.stored, "float32")

    def store(self, value: Any) -> None:
        """Keeps a float32 tensor, rounded."""
        noise = self.draw(self.shape, self.stream + self.assignments)
        self.assignments += 1
        self.stored.assign(stochastic(value, noise))


class StochasticRounding(views.Views):
    """Rounds the new value of every bfloat16 variable stochastically."""

    def make(self) -> dict[int, keras.Variable]:
        """Creates the views."""
        self.created: list[StochasticView] = []
        return super().make()

    def make_view(self, variable: keras.Variable) -> StochasticView:
        """Creates the view of one bfloat16 variable."""
        view = StochasticView(variable, len(self.created) + 1, self.draw)
        self.created.append(view)
        return view

    @contextlib.contextmanager
    def creating_slots(self) -> Iterator[None]:
        """Places the slots, and makes them bfloat16 if that was asked for."""
        with contextlib.ExitStack() as undo:
            undo.enter_context(super().creating_slots())
            if self.optimizer.slot_dtype == "bfloat16":
                for each in optimizers.workers(self.optimizer.inner_optimizer):
                    self._narrow_slots(undo, each)
            yield

    def _narrow_slots(
        self, undo: contextlib.ExitStack, optimizer: optimizers.Optimizer
    ) -> None:
        original = optimizer.add_variable_from_reference

        def add(
            reference_variable: keras.Variable,
            name: str | None = None,
            initializer: Any = "zeros",
        ) -> keras.Variable:
            narrow = isinstance(reference_variable, StochasticView)
            if not narrow or name in WIDE_SLOTS:
                return original(reference_variable, name, initializer)
            slot = original(reference_variable.stored, name, initializer)
            view = self.make_view(slot)
            # The variable behind the view is tracked already, and a list that
            # lost an element is one TensorFlow would not save.
            optimizers.count_as_tracked(optimizer, view)
            return view

        attributes.swap(undo, optimizer, "add_variable_from_reference", add)

    def draw(self, shape: tuple[int, ...], stream: int) -> Any:
        """Draws random bits of the current step."""
        step = ops.convert_to_tensor(self.optimizer.iterations)
        return random_bits(shape, self.optimizer.seed_variable, stream, step)

    def refresh(self) -> None:
        """Starts the streams of a step anew."""
        super().refresh()
        for view in self.created:
            view.assignments = 0
