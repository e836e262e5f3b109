"""The record of a compiled training step, which prints as tables."""

import dataclasses
import json
from typing import Any

from tfmix import _tables

# The table shows so many products, the costliest ones. `rows` and JSON have
# all.
_SHOWN = 20


@dataclasses.dataclass(frozen=True)
class CompiledProduct:
    """One matrix product or convolution of the compiled step.

    Attributes:
        layer: The path of its layer; `""` for products of the optimizer and
            the loss.
        phase: `"forward"` or `"backward"`.
        shape: `(m, k, n)` of `(m, k) x (k, n)`, as the device multiplies.
        count: How many of these products one kernel computes.
        dtype: The dtype of the factors, `"float16"` for example.
        kernel: What computes it: `"Triton"`, `"cuBLAS"`, `"cuDNN"`, `"MXU"`.
        flops: The multiplications and additions of all these products, in all
            rounds of a loop.
    """

    layer: str
    phase: str
    shape: tuple[int, int, int]
    count: int
    dtype: str
    kernel: str
    flops: int


@dataclasses.dataclass(frozen=True)
class StepMemory:
    """The memory of a step, in bytes.

    Attributes:
        arguments: Weights, optimizer, metrics and batch.
        temporaries: Further memory that the step needs while it runs:
            gradients and activations.
        peak: Both, and results that do not overwrite an argument.
        available: The memory of the device.
    """

    arguments: int
    temporaries: int
    peak: int
    available: int

    @property
    def fits(self) -> bool:
        """True if the device has enough memory."""
        return self.peak <= self.available


@dataclasses.dataclass(frozen=True)
class CompiledStep(_tables.Printed):
    """A training step, compiled for an accelerator; prints as a table.

    Attributes:
        rows: One `CompiledProduct` for each product, the costliest first.
        kernels: The number of launches that compute something.
        copies: The number of copies inside the device's memory.
        conditionals: The number of branches, at which a GPU waits for the
            host.
        memory: A `StepMemory`.
        flops: Operations of all products.
        bytes: Bytes that kernels read and write in the device's memory; only
            the used part for gathers and slices. Data that a TPU fetches into
            its on-chip memory counts once.
        open_loops: The number of loops whose rounds depend on the data. Their
            bodies count once in all numbers above; other loops count each
            round.
        seconds: The larger of two bounds: products at the published rate,
            bytes at the published bandwidth. A step can only be faster if a
            GPU reads data from its cache.
        bound: `"compute"` or `"memory"`, the larger bound.
        model: The name of the model.
        policy: The name of the policy.
        target: The name of the target.
        batch_size: Rows of a batch.
        backend: The Keras backend that lowered the step.
    """

    rows: tuple[CompiledProduct, ...]
    kernels: int
    copies: int
    conditionals: int
    memory: StepMemory
    flops: int
    bytes: int
    open_loops: int
    seconds: float
    bound: str
    model: str
    policy: str
    target: str
    batch_size: int
    backend: str

    @property
    def share_16bit(self) -> float:
        """Share of the products' operations in 16 or 8 bit, 0 to 1."""
        fast = sum(row.flops for row in self.rows if not _is_wide(row))
        return fast / self.flops if self.flops else 0.0

    @property
    def float32_layers(self) -> tuple[str, ...]:
        """The layers with products in float32, the costliest first."""
        return tuple(dict.fromkeys(r.layer for r in self.rows if _is_wide(r)))

    @property
    def title(self) -> str:
        """One line: policy, target, share in 16 bit, bound."""
        products = "no products"
        if self.rows:
            products = f"{self.share_16bit:.0%} of the products in 16 bit"
        return (
            f"{self.policy} on {self.target}, batch of "
            f"{self.batch_size}: {products}, at least "
            f"{1e3 * self.seconds:.3g} ms ({self.bound})"
        )

    def tables(self) -> list[_tables.Table]:
        """Returns the tables to print."""
        heads, rows = ("", self.policy), [*_figures(self).items()]
        return [self._products(), _tables.Table(heads, rows)]

    def to_json(self) -> str:
        """Returns the record as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def to_dict(self) -> dict[str, Any]:
        """Returns the record as plain values."""
        data = dataclasses.asdict(self)
        data["memory"]["fits"] = self.memory.fits
        data["share_16bit"] = self.share_16bit
        data["float32_layers"] = list(self.float32_layers)
        return data

    def _products(self) -> _tables.Table:
        heads = ("layer", "phase", "(m, k, n)", "dtype", "kernel", "GFLOP")
        rows = [
            (
                row.layer or "-",
                row.phase,
                f"{row.count} x {row.shape}"
                if row.count > 1
                else f"{row.shape}",
                row.dtype,
                row.kernel,
                f"{row.flops / 1e9:.3g}",
            )
            for row in self.rows[:_SHOWN]
        ]
        notes = []
        if not self.rows:
            notes.append(
                "to XLA, a product with one row or one column is a sum, of "
                "which only the bytes are counted"
            )
        if (more := len(self.rows) - _SHOWN) > 0:
            notes.append(f"and {more} smaller ones: see `rows`")
        if self.float32_layers and self.share_16bit:
            names = ", ".join(path or "-" for path in self.float32_layers)
            notes.append(f"products in float32: {names}")
        if self.open_loops:
            notes.append(
                f"{self.open_loops} loop(s) whose rounds depend on the data: "
                "their bodies count once"
            )
        return _tables.Table(heads, rows, self.title, notes)


def _figures(step: CompiledStep) -> dict[str, str]:
    memory = step.memory
    fits = "fits" if memory.fits else "does not fit"
    return {
        "products in 16 bit": f"{step.share_16bit:.0%}" if step.rows else "-",
        "kernels": f"{step.kernels:,}",
        "copies": f"{step.copies:,}",
        "conditionals": f"{step.conditionals:,}",
        "arguments, MB": f"{memory.arguments / 1e6:,.1f}",
        "temporaries, MB": f"{memory.temporaries / 1e6:,.1f}",
        "peak, MB": f"{memory.peak / 1e6:,.1f} ({fits})",
        "GFLOP": f"{step.flops / 1e9:,.3g}",
        "GB moved": f"{step.bytes / 1e9:,.3g}",
        "at least, ms": f"{1e3 * step.seconds:.3g} ({step.bound})",
    }


def _is_wide(row: CompiledProduct) -> bool:
    # The dtype of the factors counts, even if they were rounded before. A TPU
    # adds up masks in products of integers, which are as fast as 16 bit.
    return not {"float32", "float64"}.isdisjoint(row.dtype.split("/"))
