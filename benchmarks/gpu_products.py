"""Times single products in float8 and bfloat16, for `benchmarks.gpu`.

    python -m benchmarks.gpu_products LOCK UNTIL full|tiny [ROWS,K,N ...]

It times a Dense layer's product with both gradients. As under a mixed policy,
inputs are bfloat16 and weights are float32. It answers shape by shape, without
the named shapes. All programs with the same number of rows are compiled in
parallel threads, and then timed under the file lock.
"""

import concurrent.futures
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp

from benchmarks import answers, gpu_worker
from tfmix.float8 import product

# The most important ones come first, because a run may end early.
ROWS = (4096, 1024, 32768, 8192)
SHAPES = (
    (4096, 14336),
    (4096, 4096),
    (768, 768),
    (768, 3072),
    (1024, 4096),
    (2048, 2048),
    (2048, 8192),
    (8192, 8192),
)
TINY_ROWS, TINY_SHAPES = (32,), ((16, 16), (16, 48))
# Programs with fewer operations have several layers, so that their start does
# not dominate.
_LARGE, _LAYERS = 1e12, 8
_SECONDS, _RUNS = 0.02, 5
Shape = tuple[int, int, int]


def bfloat16(x: Any, weight: Any) -> Any:
    """Multiplies as under mixed_bfloat16."""
    return x @ weight.astype(jnp.bfloat16)


def float8(x: Any, weight: Any) -> Any:
    """Multiplies as under mixed_float8."""
    return product.product(x, weight.astype(jnp.bfloat16))


WAYS: dict[str, Callable] = {"bfloat16": bfloat16, "float8": float8}


def layers_of(shape: Shape) -> int:
    """Returns the number of independent layers in a program of this shape."""
    rows, k, n = shape
    return 1 if 6 * rows * k * n > _LARGE else _LAYERS


def drawn(shape: Shape, key: Any) -> list[tuple[Any, Any, Any]]:
    """Returns inputs, weights and gradients of the outputs for each layer."""
    rows, k, n = shape
    layers = []
    for each in jax.random.split(key, layers_of(shape)):
        of_x, of_weight, of_g = jax.random.split(each, 3)
        x = jax.random.normal(of_x, (rows, k), jnp.bfloat16)
        weight = jax.random.normal(of_weight, (k, n)) / k**0.5
        g = jax.random.normal(of_g, (rows, n), jnp.bfloat16) * 1e-3
        layers.append((x, weight, g))
    return layers


def step(way: str, layers: list[tuple[Any, Any, Any]]) -> list[tuple]:
    """Returns each layer's output and both gradients, so none is skipped."""
    results = []
    for x, weight, g in layers:
        output, pull = jax.vjp(WAYS[way], x, weight)
        results.append((output, *pull(g)))
    return results


def programs(shape: Shape) -> dict[str, Callable]:
    """Returns the functions to compile: random inputs, and a step per way.

    All inputs of a step are arguments, so that XLA cannot compute them while
    compiling.
    """
    return {
        "drawn": functools.partial(drawn, shape),
        **{way: functools.partial(step, way) for way in WAYS},
    }


def compiled(shapes: list[Shape]) -> dict[Shape, dict[str, Any]]:
    """Compiles the programs of all shapes in parallel."""
    key = jax.random.key(0)

    def one(work: tuple[Shape, str, Callable]) -> Any:
        shape, name, function = work
        given = key if name == "drawn" else jax.eval_shape(drawn_of[shape], key)
        return jax.jit(function).lower(given).compile()

    drawn_of = {shape: functools.partial(drawn, shape) for shape in shapes}
    work = [(s, *p) for s in shapes for p in programs(s).items()]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        made = pool.map(one, work)
        found: dict[Shape, dict[str, Any]] = {shape: {} for shape in shapes}
        for (shape, name, _), program in zip(work, made, strict=True):
            found[shape][name] = program
    return found


def milliseconds(program: Callable, given: Any, seconds: float) -> float:
    """Returns the time of a call, as the median of runs of some seconds.

    Calls are queued on the device, and only the end is awaited, so that
    Python does not slow them down.
    """

    def run(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            last = program(given)
        jax.block_until_ready(last)
        return (time.perf_counter() - start) / calls

    run(2)
    calls = max(1, round(seconds / run(3)))
    return 1e3 * statistics.median(run(calls) for _ in range(_RUNS))


def measured(shapes: list[Shape], seconds: float) -> Iterator[dict[str, Any]]:
    """Compiles shapes together, then yields a row for each."""
    for shape, made in compiled(shapes).items():
        given = made["drawn"](jax.random.key(0))
        ms = {
            way: milliseconds(made[way], given, seconds) / layers_of(shape)
            for way in WAYS
        }
        yield {
            **dict(zip(("rows", "k", "n"), shape, strict=True)),
            **{f"{way}, ms": round(value, 5) for way, value in ms.items()},
            "ratio": round(ms["bfloat16"] / ms["float8"], 3),
        }


def main() -> None:
    """Answers with a row for each shape, without the named ones."""
    lock, until, size, *names = sys.argv[1:]
    tiny = size == "tiny"
    rows, shapes = (TINY_ROWS, TINY_SHAPES) if tiny else (ROWS, SHAPES)
    known = {tuple(map(int, name.split(","))) for name in names}
    for count in rows:
        asked = [(count, k, n) for k, n in shapes]
        asked = [shape for shape in asked if shape not in known]
        if not asked:
            continue
        with gpu_worker.alone(lock):
            if time.time() > float(until):
                return
            for row in measured(asked, 1e-3 if tiny else _SECONDS):
                answers.answer(row)


if __name__ == "__main__":
    main()
