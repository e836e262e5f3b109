"""A worker of `benchmarks.peers`: Adam and loss scaling in plain JAX.

Adam as optax writes it, the scaling as jmp does: gradients times the inverse
scale, one boolean over all of them, and a `where` between the new and the old
state, which computes the update in any case.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import turns

SYSTEMS = ("bare", "jmp's way")
_RATE, _BETA_1, _BETA_2, _EPSILON = 1e-3, 0.9, 0.999, 1e-8
_GROWTH_STEPS = 2000
State = dict[str, Any]


def adam(state: State, grads: list[Any]) -> State:
    """Returns the state after a step of Adam."""
    count = state["count"] + 1
    first = [
        _BETA_1 * m + (1 - _BETA_1) * g
        for m, g in zip(state["first"], grads, strict=True)
    ]
    second = [
        _BETA_2 * v + (1 - _BETA_2) * g * g
        for v, g in zip(state["second"], grads, strict=True)
    ]
    in_first = 1 - _BETA_1**count
    in_second = 1 - _BETA_2**count
    parameters = [
        p - _RATE * (m / in_first) / (jnp.sqrt(v / in_second) + _EPSILON)
        for p, m, v in zip(state["parameters"], first, second, strict=True)
    ]
    return {
        "parameters": parameters,
        "first": first,
        "second": second,
        "count": count,
    }


def scaled_adam(state: State, grads: list[Any]) -> State:
    """Returns the state after a step on gradients of a scaled loss."""
    scale, counter = state["scale"], state["counter"]
    grads = [g * (1 / scale) for g in grads]
    finite = jnp.all(jnp.array([jnp.all(jnp.isfinite(g)) for g in grads]))
    old = {name: state[name] for name in state if name in _ADAM}
    new = jax.tree.map(
        lambda after, before: jnp.where(finite, after, before),
        adam(old, grads),
        old,
    )
    grow = finite & (counter == _GROWTH_STEPS - 1)
    grown = jnp.where(grow, scale * 2, scale)
    new["scale"] = jnp.where(finite, grown, jnp.maximum(1.0, scale / 2))
    new["counter"] = jnp.where(finite & ~grow, counter + 1, 0)
    return new


_ADAM = ("parameters", "first", "second", "count")
_STEPS = dict(zip(SYSTEMS, (adam, scaled_adam), strict=True))


def milliseconds(
    system: str, layers: int, width: int, repeats: int
) -> float | list[str]:
    """Returns the time of a step; the systems' names if asked for `"?"`."""
    if system == "?":
        return list(SYSTEMS)
    step = prepared(system, layers, width)
    # The first step after the other processes' turns finds cold caches.
    step()
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    return 1e3 * (time.perf_counter() - start) / repeats


@functools.lru_cache(maxsize=len(SYSTEMS))
def prepared(system: str, layers: int, width: int) -> Callable[[], Any]:
    """Returns a warm step that waits for its result."""
    shapes = [(width, width), (width,)] * layers
    state = initial(shapes)
    if system != "bare":
        state |= {"scale": jnp.float32(2**15), "counter": jnp.int32(0)}
    grads = [jnp.full(shape, 1e-3) for shape in shapes]
    compiled = jax.jit(_STEPS[system], donate_argnums=0)
    kept = [state]

    def step() -> None:
        kept[0] = jax.block_until_ready(compiled(kept[0], grads))

    for _ in range(3):
        step()
    return step


def initial(shapes: list[tuple[int, ...]]) -> State:
    """Returns Adam's state before the first step."""

    def zeros() -> list[Any]:
        return [jnp.zeros(shape) for shape in shapes]

    return {
        "parameters": zeros(),
        "first": zeros(),
        "second": zeros(),
        "count": jnp.int32(0),
    }


if __name__ == "__main__":
    turns.serve(milliseconds)
