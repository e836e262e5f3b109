"""Counts the cost of float8's scales in a program for an H200.

python -m benchmarks.float8 [--json] [--save=docs]

XLA's compiler (the extra `[nvidia]`, or `make targets`) compiles a
transformer's training step; nothing is timed. tfmix scales each tensor by its
own largest number. This is compared with scales from earlier steps ("delayed"
in NVIDIA's Transformer Engine), which still need each tensor's largest number
for the next step, and with fixed scales, which need nothing and could not
train.
"""

import collections
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import keras
from keras import ops

import tfmix
from benchmarks import compiled, gpu_models, results
from tfmix.float8 import product
from tfmix.tools.hardware import compiled_step

WIDTHS = (1024, 2048)
ROWS = 32
# The transformer has two blocks, and rows of 256 tokens.
SHAPE = {"length": 256, "blocks": 2, "vocabulary": 1008}
# This number replaces the scale of an earlier step.
_KNOWN = -3


def _fixed(tensor: Any, to: product.Format) -> tuple[Any, Any]:
    scale = 2.0 ** (to.exponent + _KNOWN)
    largest = 1.75 * 2.0**to.exponent
    scaled = ops.clip(tensor * scale, -largest, largest)
    powers = ops.convert_to_tensor([scale, -1.0, -1.0 / scale], "float32")
    return ops.cast(scaled, to.dtype), powers


def _delayed(tensor: Any, to: product.Format) -> tuple[Any, Any]:
    narrow, powers = _fixed(tensor, to)
    # The largest number is computed for the next step's scale.
    largest = ops.cast(ops.max(ops.abs(tensor)), "float32")
    return narrow, ops.where(largest > 1e38, 2 * powers, powers)


WAYS: dict[str, tuple[str, Callable]] = {
    "bfloat16": ("mixed_bfloat16", product.rounded),
    "float8, scales of this step (tfmix)": ("mixed_float8", product.rounded),
    "float8, scales of earlier steps": ("mixed_float8", _delayed),
    "float8, fixed scales": ("mixed_float8", _fixed),
}


def step(
    width: int, policy: str, rounded: Callable
) -> compiled_step.CompiledStep:
    """Compiles a training step with one way to round to float8."""
    keras.utils.clear_session()
    with tfmix.policy_scope(policy):
        model = gpu_models.transformer(width=width, heads=width // 64, **SHAPE)
    with mock.patch.object(product, "rounded", rounded):
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss)
        return tfmix.hardware.compile_for(model, ROWS, target="h200")


def table(width: int) -> results.Table:
    """Compares the ways at one width."""
    rows = []
    for name, (policy, rounded) in WAYS.items():
        made = step(width, policy, rounded)
        work: collections.Counter[str] = collections.Counter()
        for row in made.rows:
            work[row.dtype] += row.flops
        rows.append(
            {
                "products": name,
                "in float8": f"{work['float8'] / work.total():.1%}",
                "kernels": made.kernels,
                "GB moved": made.bytes / 1e9,
                "at least, ms": f"{1e3 * made.seconds:.3f} ({made.bound})",
            }
        )
    return results.Table(f"Blocks of width {width}", rows)


FLAGS = results.flag_values()


def tables() -> list[results.Table]:
    """Compares the ways at all widths."""
    return [table(width) for width in results.track(WIDTHS, "widths")]


def main() -> None:
    """Parses, compiles, prints."""
    results.parse(FLAGS)
    if compiled.compilers_there("h200"):
        results.measure("float8", FLAGS, tables)


if __name__ == "__main__":
    results.start(main, FLAGS)
