"""The transformer of `benchmarks.gpu` in plain JAX, as a bound for Keras.

It has the layers, sizes and Adam of `gpu_models.transformer`. Weights are
float32 and cast once per step. All other numbers are bfloat16, except in
normalisations and the loss. Attention is fused if the device supports it, and
the state is donated.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import gpu_models

Weights = dict[str, Any]


def initial(width: int, blocks: int, vocabulary: int, **_: Any) -> Weights:
    """Returns float32 weights; each block's are stacked along an axis."""
    random = np.random.default_rng(0)

    def drawn(*shape: int) -> Any:
        values = random.normal(size=shape) / np.sqrt(shape[-2])
        return jnp.asarray(values, jnp.float32)

    def normal(*leading: int) -> Weights:
        shape = (*leading, width)
        return dict(scale=jnp.ones(shape), offset=jnp.zeros(shape))

    def dense(inputs: int, outputs: int, *leading: int) -> Weights:
        kernel = drawn(*leading, inputs, outputs)
        return dict(kernel=kernel, bias=jnp.zeros((*leading, outputs)))

    return {
        "embedding": drawn(vocabulary, width),
        "blocks": {
            "before_attention": normal(blocks),
            "query_key_value": dense(width, 3 * width, blocks),
            "output": dense(width, width, blocks),
            "before_hidden": normal(blocks),
            "hidden": dense(width, 4 * width, blocks),
            "back": dense(4 * width, width, blocks),
        },
        "last": normal(),
        "logits": dense(width, vocabulary),
    }


def loss(weights: Weights, x: Any, y: Any, heads: int, blocks: int) -> Any:
    """Returns the mean cross-entropy over all positions."""
    small = jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights)
    hidden = small["embedding"][x]
    # XLA schedules a Python loop better than a scan over 12 blocks.
    for i in range(blocks):
        block = jax.tree.map(lambda w, i=i: w[i], small["blocks"])
        hidden = _block(hidden, block, heads)
    hidden = _normalised(hidden, small["last"])
    logits = _dense(hidden, small["logits"]).astype(jnp.float32)
    log_p = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(log_p, y[..., None], axis=-1))


def _block(x: Any, block: Weights, heads: int) -> Any:
    rows, length, width = x.shape
    joined = _dense(
        _normalised(x, block["before_attention"]), block["query_key_value"]
    )
    query, key, value = jnp.split(
        joined.reshape(rows, length, 3 * heads, width // heads), 3, axis=2
    )
    mixed = _attention(query, key, value).reshape(rows, length, width)
    x = x + _dense(mixed, block["output"])
    hidden = _dense(_normalised(x, block["before_hidden"]), block["hidden"])
    return x + _dense(jax.nn.gelu(hidden, approximate=False), block["back"])


def _attention(query: Any, key: Any, value: Any) -> Any:
    fused = jax.default_backend() == "gpu"
    return jax.nn.dot_product_attention(
        query, key, value, implementation="cudnn" if fused else "xla"
    )


def _dense(x: Any, layer: Weights) -> Any:
    return x @ layer["kernel"] + layer["bias"]


def _normalised(x: Any, layer: Weights) -> Any:
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide, -1, keepdims=True)
    variance = jnp.mean(jnp.square(wide - mean), -1, keepdims=True)
    normal = ((wide - mean) * jax.lax.rsqrt(variance + 1e-3)).astype(x.dtype)
    return normal * layer["scale"] + layer["offset"]


def adam(state: dict[str, Any], grads: Weights) -> dict[str, Any]:
    """Returns the state after a step of Adam with Keras's constants."""
    count = state["count"] + 1
    rate = 1e-4 * jnp.sqrt(1 - 0.999**count) / (1 - 0.9**count)
    first = jax.tree.map(lambda m, g: m + 0.1 * (g - m), state["first"], grads)
    second = jax.tree.map(
        lambda v, g: v + 0.001 * (g * g - v), state["second"], grads
    )
    weights = jax.tree.map(
        lambda w, m, v: w - rate * m / (jnp.sqrt(v) + 1e-7),
        state["weights"],
        first,
        second,
    )
    return {
        "weights": weights,
        "first": first,
        "second": second,
        "count": count,
    }


class Session:
    """The hand-written transformer as a row; see `gpu_worker.Session`."""

    def __init__(self, tiny: bool) -> None:
        task = gpu_models.task("transformer", tiny)
        self._batch = jax.device_put(task.batch_of_all())
        weights = initial(**task.sizes)
        self.weights = sum(leaf.size for leaf in jax.tree.leaves(weights))
        self._state = {
            "weights": weights,
            "first": jax.tree.map(jnp.zeros_like, weights),
            "second": jax.tree.map(jnp.zeros_like, weights),
            "count": jnp.int32(0),
        }
        heads, blocks = task.sizes["heads"], task.sizes["blocks"]

        @functools.partial(jax.jit, donate_argnums=0)
        def step(state: dict[str, Any], x: Any, y: Any) -> Any:
            value, grads = jax.value_and_grad(loss)(
                state["weights"], x, y, heads, blocks
            )
            return adam(state, grads), value

        self._step = step

    def train(self, steps: int) -> float:
        """Runs steps; returns the last loss."""
        for _ in range(steps):
            self._state, value = self._step(self._state, *self._batch)
        return float(value)

    def peak(self) -> int | None:
        """Returns the most bytes that were in use, `None` without a GPU."""
        stats = jax.local_devices()[0].memory_stats() or {}
        return stats.get("peak_bytes_in_use")
