"""Compares a step without XLA in TensorFlow with that of Keras's policies.

python -m benchmarks.graph [--json] [--save=docs]

Counted in the step's graph, traced for a GPU, which the host needs not have:
the time of all products at a T4's published peaks, the bytes that operations
read and write, and how many operations have a result of more than one number.
What a loop runs is counted for each of its steps.
TensorFlow computes operations on constants once, so they are left out.
"""

import collections
import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

from absl import flags

from benchmarks import answers, results

POLICIES = "mixed_float16", "mixed_bfloat16"
# A replica's step, as `tf.distribute.MirroredStrategy` runs it.
REPLICAS = "the same on two replicas"
# TFLOP/s of a T4 in 16 bit, and in float32.
_NARROW, _WIDE = 65.0, 8.1
# Operations that launch no kernel.
_FREE = frozenset(
    "Const Placeholder Identity IdentityN Reshape Shape VarHandleOp ExpandDims "
    "PartitionedCall StatefulPartitionedCall If StatelessIf While NoOp Squeeze "
    "StatelessWhile StopGradient PreventGradient ReadVariableOp Size Rank "
    "BroadcastGradientArgs ShapeN".split()
)


def models() -> Iterator[tuple[str, Any, Any]]:
    """Yields names, a stack of layers, and the shape of a batch."""
    from keras import layers

    last = layers.GlobalAveragePooling2D
    pixels = 32, 32, 32, 16
    same = {"padding": "same", "activation": "relu"}
    yield "three Dense", _dense(1024, 1024), (256, 512)
    yield REPLICAS, _dense(1024, 1024), (256, 512)
    three = [layers.Conv2D(size, 3, **same) for size in (64, 64, 128)]
    yield "three Conv2D", [*three, last()], pixels
    two = [layers.Conv1D(128, 5, activation="relu"), layers.Conv1D(128, 1)]
    yield "two Conv1D", [*two, layers.GlobalMaxPooling1D()], (32, 256, 32)
    heads = layers.EinsumDense("abc,cde->abde", (None, 8, 64), bias_axes="de")
    joined = layers.EinsumDense("abde,dec->abc", (None, 128))
    two = [heads, joined, layers.GlobalAveragePooling1D()]
    yield "two EinsumDense", two, (32, 64, 128)
    mixed = [
        layers.SeparableConv2D(64, 3, **same),
        layers.DepthwiseConv2D(3, padding="same"),
        layers.BatchNormalization(),
        layers.Conv2DTranspose(32, 3, strides=2, padding="same"),
    ]
    yield "separable, depthwise, transposed", [*mixed, last()], pixels
    loops = [layers.LSTM(128, return_sequences=True), layers.LSTM(128)]
    yield "two LSTM", loops, (64, 20, 64)
    both = [layers.Bidirectional(layers.GRU(128))]
    yield "bidirectional GRU", both, (64, 20, 64)
    yield "ConvLSTM2D", [layers.ConvLSTM2D(32, 3), last()], (8, 8, 16, 16, 8)
    yield "Embedding", [layers.Embedding(1000, 256), *_dense(256)], (16, 64)
    attention = layers.MultiHeadAttention(4, 64)
    yield "MultiHeadAttention", [*_dense(256), attention], (16, 64, 256)
    grouped = layers.GroupQueryAttention(64, 4, 2)
    yield "GroupQueryAttention", [*_dense(256), grouped], (16, 64, 256)


def _dense(*sizes: int) -> list:
    from keras import layers

    return [layers.Dense(size, activation="relu") for size in sizes]


def counts(way: str, policy: str) -> dict[str, list[float]]:
    """Counts each model's step: seconds of products, bytes and kernels."""
    import keras
    import tensorflow as tf

    if way == "tfmix":
        import tfmix
        from tfmix._keras import context

        tfmix.set_global_policy(policy)
        gpu: Callable = functools.partial(context.compiled_for, "cuda")
    else:
        keras.config.set_dtype_policy(policy)
        gpu = contextlib.nullcontext
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * 2,
    )
    found = {}
    for name, *model in models():
        strategy = tf.distribute.get_strategy()
        if name == REPLICAS:
            strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        with strategy.scope():
            found[name] = _counts(strategy, gpu, *model)
    return found


def _counts(
    strategy: Any, gpu: Callable, stack: list, shape: tuple[int, ...]
) -> list[float]:
    import keras
    import tensorflow as tf

    is_ids = isinstance(stack[0], keras.layers.Embedding)
    inputs = x = keras.Input(shape[1:], dtype="int32" if is_ids else None)
    for layer in stack:
        is_attention = "Attention" in type(layer).__name__
        x = layer(x, x) if is_attention else layer(x)
    outputs = keras.layers.Dense(10, dtype="float32")(x)
    model = keras.Model(inputs, outputs)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(), loss, jit_compile=False)
    model.optimizer.build(model.trainable_variables)

    # Each replica is traced in a thread of its own.
    def train_step(x: Any, y: Any) -> Any:
        with gpu():
            return model.train_step((x, y))

    step = tf.function(lambda x, y: strategy.run(train_step, args=(x, y)))
    traced = step.get_concrete_function(
        tf.zeros(shape, inputs.dtype),
        tf.zeros((shape[0], *outputs.shape[1:-1]), "int32"),
    )
    found = [0.0, 0.0, 0.0]
    # All loops are those of recurrent layers, over the first axis of a sample.
    for op, times in _operations(traced.graph, set(), shape[1]):
        for place, value in enumerate(_cost(op)):
            found[place] += value * times
    return found


def _operations(
    graph: Any, seen: set, steps: int, times: int = 1
) -> Iterator[tuple[Any, int]]:
    """Yields what a graph's results, or its effects, need, and how often.

    Functions that several operations call are counted once.
    """
    todo = collections.deque(tensor.op for tensor in graph.outputs)
    todo += [op for op in graph.get_operations() if op.op_def.is_stateful]
    todo += getattr(graph, "control_outputs", [])
    while todo:
        op = todo.pop()
        if op in seen:
            continue
        seen.add(op)
        yield op, times
        todo += [tensor.op for tensor in op.inputs]
        todo += op.control_inputs
        for value in op.node_def.attr.values():
            for function in (value.func, *value.list.func):
                if function.name and function.name not in seen:
                    seen.add(function.name)
                    inner = graph._get_function(function.name)
                    often = times * steps if "While" in op.type else times
                    yield from _operations(inner.graph, seen, steps, often)


def _cost(op: Any) -> tuple[float, float, float]:
    sizes = [_size(tensor) for tensor in op.outputs]
    if op.type in _FREE or max(sizes, default=0) <= 1:
        return 0.0, 0.0, 0.0
    if all(tensor.op.type == "Const" for tensor in op.inputs):
        return 0.0, 0.0, 0.0
    moved = sum(_size(x) * x.dtype.size for x in (*op.inputs, *op.outputs))
    peak = _NARROW if op.inputs and op.inputs[-1].dtype.size == 2 else _WIDE
    return _multiplications(op) * 2 / (peak * 1e12), moved, 1.0


def _size(tensor: Any) -> int:
    known = tensor.shape.as_list() if tensor.shape.rank is not None else [None]
    return 0 if None in known else math.prod(known)


def _multiplications(op: Any) -> float:
    """Returns how often a product of matrices, or a convolution, multiplies."""
    import tensorflow as tf

    if "MatMul" in op.type:
        flags_of_a = (op.node_def.attr[x].b for x in ("transpose_a", "adj_x"))
        summed = op.inputs[0].shape[-2 if any(flags_of_a) else -1]
        return _size(op.outputs[0]) * summed
    if op.type == "Einsum":
        sides = op.node_def.attr["equation"].s.decode().split("->")[0]
        sizes: dict[str, int] = {}
        for letters, factor in zip(sides.split(","), op.inputs, strict=True):
            named = letters.replace("...", "")
            known = factor.shape.as_list()[-len(named) :]
            sizes |= dict(zip(named, known, strict=True))
        return math.prod(sizes.values())
    if not op.type.startswith(("Conv2D", "DepthwiseConv2d")):
        return 0
    kernel = op.inputs[1].shape.as_list()
    if "Filter" in op.type:
        kernel = op.outputs[0].shape.as_list()
        if None in kernel:
            kernel = list(tf.get_static_value(op.inputs[1]))
    result = op.inputs[2] if "Backprop" in op.type else op.outputs[0]
    each = kernel[:2] if op.type.startswith("Depthwise") else kernel[:-1]
    return _size(result) * math.prod(each)


def table(policy: str) -> results.Table:
    """Returns tfmix's counts over Keras's, a row for each model."""
    ours, theirs = (
        answers.answer_of("benchmarks.graph", "--count", f"{way},{policy}")
        for way in ("tfmix", "keras")
    )
    columns = "products on a T4", "bytes", "kernels"
    rows = []
    for name, counted in ours.items():
        pairs = zip(columns, counted, theirs[name], strict=True)
        ratios = {column: mine / keras for column, mine, keras in pairs}
        rows.append({"model": name, **ratios})
    note = "tfmix's over those of Keras's own policy of the same name."
    return results.Table(f"A step without XLA: {policy}", rows, note)


FLAGS = results.flag_values()
flags.DEFINE_list(
    "count", [], "the part of a process of its own", flag_values=FLAGS
)


def main() -> int:
    """Parses, counts, prints; 1 if products run off the Tensor Cores."""
    results.parse(FLAGS)
    if FLAGS.count:
        answers.answer(counts(*FLAGS.count))
        return 0
    tables = results.measure(
        "graph",
        FLAGS,
        lambda: map(table, results.track(POLICIES, "policies")),
        "counted, not timed",
    )
    rows = [row for shown in tables for row in shown.rows]
    return int(any(row["products on a T4"] > 1.02 for row in rows))


if __name__ == "__main__":
    results.start(main, FLAGS)
