"""A worker of `benchmarks.peers`: Adam and `GradScaler` in PyTorch.

Runs under any Python that has PyTorch, and needs nothing else.
"""

import functools
import time
from collections.abc import Callable

from benchmarks import turns

# Name: whether Adam is fused, whether its gradients are scaled.
SYSTEMS = {
    "bare": (False, False),
    "GradScaler": (False, True),
    "bare, fused": (True, False),
    "GradScaler, fused": (True, True),
}


def milliseconds(
    system: str, layers: int, width: int, repeats: int
) -> float | list[str]:
    """Returns the time of a step; names and version if asked for `"?"`."""
    if system == "?":
        import torch

        return [torch.__version__, *SYSTEMS]
    refill, step = prepared(system, layers, width)
    # The first step after the other processes' turns finds cold caches.
    refill()
    step()
    total = 0.0
    for _ in range(repeats):
        # `step` divides the gradients where they lie.
        refill()
        start = time.perf_counter()
        step()
        total += time.perf_counter() - start
    return 1e3 * total / repeats


@functools.lru_cache(maxsize=len(SYSTEMS))
def prepared(
    system: str, layers: int, width: int
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Returns what gives the gradients, and a warm step on them."""
    import torch

    fused, scaled = SYSTEMS[system]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shapes = [(width, width), (width,)] * layers
    parameters = [
        torch.zeros(shape, device=device, requires_grad=True)
        for shape in shapes
    ]
    source = [torch.full(shape, 1e-3, device=device) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    grads = [parameter.grad for parameter in parameters]
    optimizer = torch.optim.Adam(parameters, fused=fused)
    scaler = torch.amp.GradScaler(device, enabled=scaled)
    scaler.scale(torch.zeros((), device=device))

    def refill() -> None:
        with torch.no_grad():
            torch._foreach_copy_(grads, source)
        _wait(device)

    def step() -> None:
        scaler.step(optimizer)
        scaler.update()
        _wait(device)

    for _ in range(3):
        refill()
        step()
    return refill, step


def _wait(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


if __name__ == "__main__":
    turns.serve(milliseconds)
