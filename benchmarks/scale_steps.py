"""Optimizer steps on variables of any number and size, under TensorFlow."""

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfmix
from benchmarks import pairs, resident

SYSTEMS = ("bare", "Keras", "tfmix")
Shapes = list[tuple[int, ...]]
_WRAP: dict[str, Callable] = {
    "bare": lambda inner: inner,
    "Keras": keras.optimizers.LossScaleOptimizer,
    "tfmix": tfmix.LossScaleOptimizer,
}
# A turn is so long at least, so that the clock and the call do not matter.
_TURN_SECONDS = 0.02


@dataclasses.dataclass
class Step:
    """A compiled step, warm.

    Attributes:
        run: Takes one step.
        operations: Nodes of its graph, those of its branches included.
        collectives: Those of them that exchange data between replicas.
        first: Seconds of the first call, with tracing.
    """

    run: Callable[[], Any]
    operations: int
    collectives: int
    first: float


def shapes(count: int, parameters: int) -> Shapes:
    """Returns shapes as a transformer's blocks have them, some of each.

    Args:
        count: How many variables.
        parameters: How many numbers in all, roughly.
    """
    # A cycle of six below holds 9 w^2 numbers, and few in its biases.
    w = max(1, round(math.sqrt(parameters * 6 / (9 * count))))
    cycle: Shapes = [(w, w), (w,), (w, 4 * w), (4 * w,), (4 * w, w), (w,)]
    return [cycle[i % len(cycle)] for i in range(count)]


def different_shapes(count: int, parameters: int) -> Shapes:
    """Returns shapes of which no two are alike."""
    width = max(1, round(2 * parameters / count**2))
    return [(i + 1, width) for i in range(count)]


def prepared(
    sizes: Shapes, systems: Sequence[str] = SYSTEMS, strategy: Any = None
) -> dict[str, Step]:
    """Builds a warm step on the same variables for each system.

    Args:
        sizes: The variables' shapes.
        systems: Some of `SYSTEMS`.
        strategy: A `tf.distribute` strategy to run under, if any.
    """
    _warm_up()
    scope = strategy.scope if strategy else contextlib.nullcontext
    with scope():
        variables = [
            keras.Variable(tf.ones(shape), name=f"v{i}")
            for i, shape in enumerate(sizes)
        ]
    grads = [tf.fill(shape, np.float32(1e-3)) for shape in sizes]
    made = {}
    for system in systems:
        with scope():
            optimizer = _WRAP[system](keras.optimizers.SGD(1e-3))
            optimizer.build(variables)
            # tfmix warns of gradients whose loss was never scaled.
            optimizer.scale_loss(1.0)
        # Traced outside, as it is called: inside it is another function.
        made[system] = _compiled(optimizer, variables, grads, strategy)
    return made


@functools.cache
def _warm_up() -> None:
    """Traces something, so that the first system pays for no imports."""
    variable = keras.Variable(tf.ones((2,)))
    for wrap in _WRAP.values():
        optimizer = wrap(keras.optimizers.SGD(1e-3))
        optimizer.build([variable])
        optimizer.scale_loss(1.0)
        _compiled(optimizer, [variable], [tf.ones((2,))], None)


def _compiled(
    optimizer: Any, variables: list[Any], grads: list[Any], strategy: Any
) -> Step:
    def update() -> Any:
        # Captured, not arguments: 5,000 of those take a while to hand over.
        optimizer.apply(_own(grads) if strategy else grads, variables)
        return tf.convert_to_tensor(optimizer.iterations.value)

    @tf.function(autograph=False)
    def step() -> Any:
        return strategy.run(update) if strategy else update()

    start = time.perf_counter()
    graph = step.get_concrete_function().graph
    step()
    first = time.perf_counter() - start
    step()
    ops = operations(graph)
    exchanging = [op for op in ops if "Collective" in op]
    return Step(step, len(ops), len(exchanging), first)


def _own(grads: list[Any]) -> list[Any]:
    """Makes gradients this replica's; equal ones would not be summed."""
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group
    factor = 1.0 + tf.cast(replica, "float32")
    return [grad * factor for grad in grads]


def operations(graph: Any) -> list[str]:
    """Returns the ops of a graph and of the functions that it calls."""
    made = graph.as_graph_def()
    inside = [each.node_def for each in made.library.function]
    return [node.op for nodes in [made.node, *inside] for node in nodes]


def times_in_turns(made: dict[str, Step], runs: int) -> dict[str, list[float]]:
    """Returns milliseconds per step; the systems take turns."""
    start = time.perf_counter()
    made["bare"].run()
    one = time.perf_counter() - start
    repeats = max(1, min(50, round(_TURN_SECONDS / one)))
    timed = {
        system: pairs.timed(lambda step=step: _wait(step.run()), repeats)
        for system, step in made.items()
    }
    return pairs.in_turns(timed, runs, warm=0)


def _wait(value: Any) -> None:
    for each in getattr(value, "values", (value,)):
        each.numpy()


def strategy_of(replicas: int) -> Any:
    """Splits the CPU and returns a strategy; once in a process."""
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * replicas
    )
    names = [f"CPU:{i}" for i in range(replicas)]
    return tf.distribute.MirroredStrategy(names)


def peak_mb(system: str, sizes: Shapes) -> float:
    """Returns how far the resident set rises while steps are taken."""
    small = prepared([(1,) * len(shape) for shape in sizes], [system])
    small[system].run()
    with resident.Peak() as peak:
        # The variables and their gradients are in it, for each alike.
        prepared(sizes, [system])[system].run()
    return peak.megabytes
