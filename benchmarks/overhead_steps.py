"""The steps that `benchmarks.overhead` times, one section per process.

    python -m benchmarks.overhead_steps SECTION RUNS

A section has its own backend, and may need devices that TensorFlow can only
create at its start. So each section runs in a new process and prints its rows
as JSON.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

import tfmix
from benchmarks import answers, pairs, resident, results
from tfmix.autocast import own_code

# The values are layers, width, and steps in a turn. A turn takes a tenth of a
# second, because a shared machine's memory changes its speed every few seconds.
MODELS = {
    "many small (200 x 32 x 32)": (200, 32, 4),
    "few large (6 x 2048 x 2048)": (6, 2048, 1),
}
# These run forward, backward and update.
TRAINED = {
    "many small (100 x 32 x 32)": (100, 32, 8),
    "few large (6 x 2048 x 2048)": (6, 2048, 1),
}
# Two replicas share the cores, and each has its own variables.
REPLICATED = {
    "many small (20 x 32 x 32)": (20, 32, 20),
    "few large (4 x 1024 x 1024)": (4, 1024, 3),
}
SYSTEMS = {
    "bare": lambda inner: inner,
    "keras": keras.optimizers.LossScaleOptimizer,
    "tfmix": tfmix.LossScaleOptimizer,
}
# `benchmarks.low_memory` compares this with the first.
WAYS = SYSTEMS | {"8 bits": tfmix.optimizers.LowMemoryOptimizer}
Step = Callable[[], Any]


def variables(layers: int, width: int) -> list[Any]:
    """Returns the kernels and biases of some dense layers."""
    shapes = [(width, width), (width,)] * layers
    return [keras.Variable(np.zeros(shape, "float32")) for shape in shapes]


def wrapped(system: str, model: list[Any]) -> Any:
    """Returns Adam, wrapped by a system and built."""
    optimizer = WAYS[system](keras.optimizers.Adam())
    optimizer.build(model)
    if system in ("keras", "tfmix"):
        optimizer.scale_loss(1.0)
    return optimizer


def tensorflow_step(system: str, size: tuple[int, int], xla: bool) -> Step:
    """Returns a step that is traced at its first call."""
    import tensorflow as tf

    model = variables(*size)
    optimizer = wrapped(system, model)
    grads = [tf.fill(v.shape, np.float32(1e-3)) for v in model]

    @tf.function(autograph=False, jit_compile=xla)
    def step(grads: list[Any]) -> Any:
        optimizer.apply(grads, model)
        return optimizer.iterations.value

    return lambda: step(grads).numpy()


def jax_compiled(system: str, size: tuple[int, int]) -> tuple[Any, list, list]:
    """Returns a compiled step, its state and gradients."""
    import jax

    model = variables(*size)
    optimizer = wrapped(system, model)

    # Inputs and outputs have the same order, so donated inputs are not copied.
    def step(state: list[Any], grads: list[Any]) -> list[Any]:
        return list(optimizer.stateless_apply(state[1], grads, state[0]))

    grads = [jax.numpy.full(v.shape, 1e-3) for v in model]
    state = [
        [jax.numpy.array(v.value) for v in each]
        for each in (model, optimizer.variables)
    ]
    lowered = jax.jit(step, donate_argnums=0).lower(state, grads)
    return lowered.compile(), state, grads


def jax_step(system: str, size: tuple[int, int]) -> Step:
    """Returns a compiled step that keeps its state between calls."""
    import jax

    compiled, state, grads = jax_compiled(system, size)

    def step() -> None:
        state[:] = compiled(state, grads)
        jax.block_until_ready(state)

    return step


def replicated_step(strategy: Any, system: str, size: tuple[int, int]) -> Step:
    """Returns a step of each replica of a strategy."""
    import tensorflow as tf

    with strategy.scope():
        model = variables(*size)
        optimizer = wrapped(system, model)

    def on_replica() -> None:
        grads = [tf.fill(v.shape, np.float32(1e-3)) for v in model]
        optimizer.apply(grads, model)

    @tf.function(autograph=False)
    def step() -> Any:
        strategy.run(on_replica)
        return tf.constant(0)

    return lambda: step().numpy()


def sparse_step(system: str, inner: str) -> Step:
    """Returns a step, forward to update, of a model with a large embedding."""
    import tensorflow as tf

    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((32,), dtype="int32"),
            keras.layers.Embedding(1_000_000, 64),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(1),
        ]
    )
    optimizer = SYSTEMS[system](getattr(keras.optimizers, inner)(0.01))
    trained = model.trainable_variables
    optimizer.build(trained)
    rng = np.random.default_rng(1)
    ids = tf.constant(rng.integers(0, 1_000_000, (256, 32)), tf.int32)
    target = tf.constant(rng.normal(size=(256, 1)), tf.float32)

    @tf.function(autograph=False)
    def step(ids: Any, target: Any) -> Any:
        with tf.GradientTape() as tape:
            output = model(ids, training=True)
            loss = tf.reduce_mean(tf.square(output - target))
            scaled = loss if system == "bare" else optimizer.scale_loss(loss)
        grads = tape.gradient(scaled, [v.value for v in trained])
        optimizer.apply(grads, trained)
        return loss

    return lambda: step(ids, target).numpy()


def dense_step(system: str, size: tuple[int, int], xla: bool) -> Step:
    """Returns a step, forward to update, of some dense layers."""
    import tensorflow as tf

    layers, width = size
    model = keras.Sequential([keras.Input((width,))])
    for _ in range(layers):
        model.add(keras.layers.Dense(width, activation="relu"))
    trained = model.trainable_variables
    optimizer = wrapped(system, trained)
    data = tf.ones((64, width))

    @tf.function(autograph=False, jit_compile=xla)
    def step(data: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(data, training=True)))
            scaled = loss if system == "bare" else optimizer.scale_loss(loss)
        grads = tape.gradient(scaled, [v.value for v in trained])
        optimizer.apply(grads, trained)
        return loss

    return lambda: step(data).numpy()


def in_turns(
    what: dict[str, Any],
    steps: dict[str, Step],
    repeats: int,
    runs: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[dict[str, Any]]:
    """Times steps in turn; returns rows with ratios within a turn."""
    timed = {
        name: pairs.timed(step, repeats, clock) for name, step in steps.items()
    }
    times = pairs.in_turns(timed, runs)
    bare = times["bare"]
    rows = []
    for system, own in times.items():
        extra = pairs.differences(own, bare)
        measured = {
            "ms": own,
            "ratio": pairs.ratios(own, bare),
            "overhead_ms": extra,
        }
        row = {**what, "system": system}
        for name, values in measured.items():
            row[name] = results.spread(values, quartiles=True)
        if system == "tfmix" and "keras" in times:
            of_keras = pairs.differences(times["keras"], bare)
            keras_extra = statistics.median(of_keras)
            # If this is negative, the machine was too busy to measure it.
            if keras_extra > 0:
                share = statistics.median(extra) / keras_extra
                row["overhead_of_keras"] = share
        rows.append(row)
    return rows


def graph(runs: int, xla: bool = False) -> list[dict[str, Any]]:
    """Measures the optimizer's step in graph mode, or under XLA."""
    rows = []
    for name, (*size, repeats) in MODELS.items():
        steps = {s: tensorflow_step(s, tuple(size), xla) for s in SYSTEMS}
        rows += in_turns({"model": name}, steps, repeats, runs)
    return rows


def training(runs: int) -> list[dict[str, Any]]:
    """Measures whole steps of dense layers in graph mode."""
    rows = []
    for name, (*size, repeats) in TRAINED.items():
        steps = {s: dense_step(s, tuple(size), False) for s in SYSTEMS}
        rows += in_turns({"model": name}, steps, repeats, runs)
    return rows


def jax(runs: int) -> list[dict[str, Any]]:
    """Measures a step on JAX, compiled and with donated state."""
    rows = []
    for name, (*size, repeats) in MODELS.items():
        steps = {s: jax_step(s, tuple(size)) for s in SYSTEMS}
        rows += in_turns({"model": name}, steps, repeats, runs)
    return rows


def mirrored(runs: int) -> list[dict[str, Any]]:
    """Measures two replicas on two virtual CPU devices."""
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    logical = [tf.config.LogicalDeviceConfiguration() for _ in range(2)]
    tf.config.set_logical_device_configuration(cpu, logical)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    rows = []
    for name, (*size, repeats) in REPLICATED.items():
        steps = {s: replicated_step(strategy, s, tuple(size)) for s in SYSTEMS}
        rows += in_turns({"model": name}, steps, repeats, runs)
    return rows


def sparse(runs: int) -> list[dict[str, Any]]:
    """Measures a million embeddings; a table fills the cache of two systems."""
    rows = []
    for inner, repeats in (("SGD", 3), ("Adagrad", 1)):
        steps = {s: sparse_step(s, inner) for s in ("bare", "tfmix")}
        rows += in_turns({"model": inner}, steps, repeats, runs)
    return rows


def mlp() -> keras.Model:
    """A hundred dense layers."""
    hidden = [keras.layers.Dense(32, activation="relu") for _ in range(100)]
    return keras.Sequential([keras.Input((32,)), *hidden])


class Block(keras.layers.Layer):
    """A block of a transformer, as a custom layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = keras.layers.MultiHeadAttention(2, 16)
        self.norms = [keras.layers.LayerNormalization() for _ in range(2)]
        self.wide = keras.layers.Dense(64, activation="gelu")
        self.narrow = keras.layers.Dense(32)

    def call(self, x: Any) -> Any:
        y = self.norms[0](x)
        x = x + self.attention(y, y)
        return x + self.narrow(self.wide(self.norms[1](x)))


def transformer() -> keras.Model:
    """A transformer of eight blocks."""
    return keras.Sequential(
        [keras.Input((16, 32)), *(Block() for _ in range(8))]
    )


def trace_step(make: Callable[[], keras.Model], falls_back: bool) -> Step:
    """Returns a function that builds a model and traces its gradient."""

    def step() -> None:
        keras.backend.clear_session()
        before = own_code.can_have
        if not falls_back:
            own_code.can_have = lambda layer: False
        try:
            with tfmix.policy_scope("mixed_bfloat16"):
                model = make()
        finally:
            own_code.can_have = before
        data = np.ones((8, *model.input_shape[1:]), "float32")
        if keras.backend.backend() == "jax":
            _trace_in_jax(model, data)
        else:
            _trace_in_tensorflow(model, data)

    return step


def _trace_in_tensorflow(model: keras.Model, data: Any) -> None:
    import tensorflow as tf

    trained = [v.value for v in model.trainable_variables]

    @tf.function(autograph=False)
    def gradient(data: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(data, training=True))
        return tape.gradient(loss, trained)

    gradient.get_concrete_function(data)


def _trace_in_jax(model: keras.Model, data: Any) -> None:
    import jax

    def loss(trained: Any, others: Any, data: Any) -> Any:
        outputs, _ = model.stateless_call(trained, others, data, training=True)
        return outputs.mean()

    trained, others = (
        [v.value for v in each]
        for each in (model.trainable_variables, model.non_trainable_variables)
    )
    jax.jit(jax.grad(loss)).lower(trained, others, data)


def tracing(runs: int) -> list[dict[str, Any]]:
    """Measures building and tracing, with and without the fallback."""
    rows = []
    # Process time does not count other programs on the machine.
    clock = time.process_time
    for make in (mlp, transformer):
        steps = {"bare": trace_step(make, False)}
        steps["tfmix"] = trace_step(make, True)
        rows += in_turns({"model": make.__name__}, steps, 1, runs, clock)
    return rows


def first_step(system: str, layers: str) -> list[dict[str, Any]]:
    """Measures the first step under XLA, with tracing and compilation."""
    # The first compilation of a process has a cost of its own, so another
    # model is compiled before.
    dense_step("bare", (1, 8), True)()
    step = dense_step(system, (int(layers), 32), True)
    start = time.perf_counter()
    step()
    return [{"seconds": time.perf_counter() - start}]


def peak(system: str, mode: str) -> list[dict[str, Any]]:
    """Measures a step's peak above the memory before it."""
    if mode == "jax":
        compiled, _, _ = jax_compiled(system, (6, 2048))
        plan = compiled.memory_analysis()
        new = plan.output_size_in_bytes - plan.alias_size_in_bytes
        return [{"mb": (plan.temp_size_in_bytes + new) / 2**20}]
    dense_step(system, (6, 64), mode == "xla")()
    step = dense_step(system, (6, 2048), mode == "xla")
    with resident.Peak() as measured:
        for _ in range(10):
            step()
    return [{"mb": measured.megabytes}]


SECTIONS: dict[str, Callable[..., list[dict[str, Any]]]] = {
    "graph": graph,
    "xla": lambda runs: graph(runs, xla=True),
    "training": training,
    "jax": jax,
    "mirrored": mirrored,
    "sparse": sparse,
    "tracing": tracing,
    "jax_tracing": tracing,
}


def main() -> None:
    """Runs one section, or one measurement of one system."""
    name, *arguments = sys.argv[1:]
    if name in SECTIONS:
        rows = SECTIONS[name](int(arguments[0]))
    else:
        rows = {"first_step": first_step, "peak": peak}[name](*arguments)
    answers.answer(rows)


if __name__ == "__main__":
    main()
