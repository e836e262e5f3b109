"""Accelerators that need not be here: what they are made of, what they can."""

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType

from tfmix import _arguments, _tables

_TERA, _GIB = 1e12, 2**30


@dataclasses.dataclass(frozen=True)
class Target:
    """One kind of accelerator, with the figures that its maker publishes.

    Attributes:
        name: What `compile_for` takes, `"h200"` for example.
        kind: `"GPU"` or `"TPU"`.
        title: The maker's own name.
        memory: Bytes of one device.
        bandwidth: Bytes a second between a device and its memory.
        rates: Operations a second in matrix products, by dtype. A dtype that
            is not there has no units of its own: XLA computes it in another.
    """

    name: str
    kind: str
    title: str
    memory: int
    bandwidth: float
    rates: Mapping[str, float]


class Targets(tuple[Target, ...], _tables.Printed):
    """A tuple of `Target` records that prints as a table."""

    def tables(self) -> list[_tables.Table]:
        """Returns what to print: rates in 10^12 operations a second."""
        known = dict.fromkeys(dtype for one in self for dtype in one.rates)
        dtypes = sorted(known, key="int8".__eq__)
        rows = [
            (
                one.name,
                one.title.removeprefix("NVIDIA "),
                f"{one.memory / _GIB:.0f}",
                f"{one.bandwidth / _TERA:.1f}",
                *(
                    f"{one.rates[dtype] / _TERA:.0f}"
                    if dtype in one.rates
                    else "-"
                    for dtype in dtypes
                ),
            )
            for one in self
        ]
        heads = ("target", "name", "GiB", "TB/s")
        return [
            _tables.Table(
                (*heads, *dtypes),
                rows,
                notes=["Rates are of matrix products, in 10^12 operations/s."],
            )
        ]


def targets() -> Targets:
    """Lists the accelerators that `compile_for` can compile for.

    Returns:
        GPUs first, then TPUs, each from the oldest on: a tuple of frozen
        `Target` records, which prints as a table.

    Examples:
        >>> [target.name for target in targets()][:4]
        ['v100', 'a100', 'h100', 'h200']
    """
    return Targets(_TARGETS.values())


def find(name: str) -> Target:
    """Returns the target of a name.

    Raises:
        TypeError: If `name` is no string.
        ValueError: If there is no such target.
    """
    if not isinstance(name, str):
        raise TypeError(
            "`target` must be a name such as 'h200'. Received: "
            f"target={name!r} of type {type(name).__name__}."
        )
    if name.lower() not in _TARGETS:
        hint = _arguments.did_you_mean(name.lower(), list(_TARGETS))
        raise ValueError(
            f"`target` must be one of {sorted(_TARGETS)!r}. Received: "
            f"target={name!r}.{hint} Several devices are asked for with "
            "`devices=4`."
        )
    return _TARGETS[name.lower()]


def topology(target: Target, devices: int) -> str:
    """Returns the grid in which a number of devices is linked, as XLA's text.

    Raises:
        ValueError: If there is no such grid.
    """
    if target.kind == "GPU":
        return f"1x1x{devices}"
    # TPUs come in squares, twice as long as wide for the odd powers of two;
    # v4 and v5p in boxes.
    axes = 3 if target.name in ("v4", "v5p") else 2
    power = int(math.log2(devices))
    if 2**power != devices or not 1 <= devices <= 256:
        raise ValueError(
            "`devices` must be a power of two from 1 to 256 for a TPU. "
            f"Received: devices={devices!r}, target={target.name!r}."
        )
    sides = [2 ** ((power + axis) // axes) for axis in range(axes)]
    return "x".join(map(str, sorted(sides, reverse=axes == 3 and power == 2)))


def config(target: Target) -> str:
    """Returns a GPU's description as XLA's compiler reads it.

    The text of a `stream_executor.GpuTargetConfigProto`.
    """
    figures = {**_ANY_GPU, **_GPUS[target.name]}
    major = figures.pop("major")
    # The units of its own kind: Hopper's and Blackwell's wide products.
    own = " feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    fields = "\n  ".join(f"{name}: {value}" for name, value in figures.items())
    return f"""gpu_device_info {{
  {fields}
  memory_bandwidth: {int(target.bandwidth)}
  device_memory_size: {target.memory}
  cuda_compute_capability {{ major: {major}{own} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{target.title}"
"""


def _target(
    name: str,
    title: str,
    memory: float,
    bandwidth: float,
    **rates: float,
) -> Target:
    kind = "GPU" if name in _GPUS else "TPU"
    by_dtype = {dtype: rate * _TERA for dtype, rate in rates.items()}
    return Target(
        name,
        kind,
        title,
        int(memory),
        bandwidth * _TERA,
        MappingProxyType(by_dtype),
    )


# What all of them have in common, in the words of XLA's description.
_ANY_GPU: dict[str, float] = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "threads_per_core_limit": 2048,
    "shared_memory_per_block": 49152,
    "registers_per_core_limit": 65536,
    "registers_per_block_limit": 65536,
    "block_dim_limit_x": 2147483647,
    "block_dim_limit_y": 65535,
    "block_dim_limit_z": 65535,
}
# From NVIDIA's white papers and the tables of the CUDA programming guide.
_GPUS: dict[str, dict[str, float]] = {
    "v100": {
        "major": 7,
        "core_count": 80,
        "fpus_per_core": 64,
        "shared_memory_per_core": 98304,
        "shared_memory_per_block_optin": 98304,
        "l2_cache_size": 6291456,
        "clock_rate_ghz": 1.53,
    },
    "a100": {
        "major": 8,
        "core_count": 108,
        "fpus_per_core": 64,
        "shared_memory_per_core": 167936,
        "shared_memory_per_block_optin": 166912,
        "l2_cache_size": 41943040,
        "clock_rate_ghz": 1.41,
    },
    "h100": {
        "major": 9,
        "core_count": 132,
        "fpus_per_core": 128,
        "shared_memory_per_core": 233472,
        "shared_memory_per_block_optin": 232448,
        "l2_cache_size": 52428800,
        "clock_rate_ghz": 1.98,
    },
    "b200": {
        "major": 10,
        "core_count": 148,
        "fpus_per_core": 128,
        "shared_memory_per_core": 233472,
        "shared_memory_per_block_optin": 232448,
        "l2_cache_size": 132644864,
        "clock_rate_ghz": 1.965,
    },
}
_GPUS["h200"] = _GPUS["h100"]
# Memory in bytes, bandwidth in TB/s, products in TFLOP/s without sparsity,
# from the makers' data sheets. float32 is what XLA takes for it by default:
# TF32 on GPUs from Ampere on, numbers rounded to bfloat16 on a TPU. int8 on a
# V100 is what its ordinary units do, four products at a time.
_TARGETS = {
    one.name: one
    for one in (
        _target(
            "v100",
            "NVIDIA V100 SXM2 16 GB",
            16935682048,
            0.898,
            float32=15.7,
            float16=125.0,
            int8=62.8,
        ),
        _target(
            "a100",
            "NVIDIA A100 SXM 80 GB",
            85100068864,
            2.039,
            float32=156.0,
            float16=312.0,
            bfloat16=312.0,
            int8=624.0,
        ),
        _target(
            "h100",
            "NVIDIA H100 SXM 80 GB",
            84942979072,
            3.352,
            float32=494.7,
            float16=989.4,
            bfloat16=989.4,
            float8=1978.9,
            int8=1978.9,
        ),
        _target(
            "h200",
            "NVIDIA H200 SXM 141 GB",
            151397597184,
            4.8,
            float32=494.7,
            float16=989.4,
            bfloat16=989.4,
            float8=1978.9,
            int8=1978.9,
        ),
        _target(
            "b200",
            "NVIDIA B200 180 GB",
            191514411008,
            7.672,
            float32=1125.0,
            float16=2250.0,
            bfloat16=2250.0,
            float8=4500.0,
            int8=4500.0,
        ),
        _target(
            "v4",
            "TPU v4",
            32 * _GIB,
            1.228,
            float32=275.0,
            bfloat16=275.0,
            int8=275.0,
        ),
        _target(
            "v5e",
            "TPU v5e",
            16 * _GIB,
            0.819,
            float32=197.0,
            bfloat16=197.0,
            int8=394.0,
        ),
        _target(
            "v5p",
            "TPU v5p",
            95 * _GIB,
            2.765,
            float32=459.0,
            bfloat16=459.0,
            int8=918.0,
        ),
        _target(
            "v6e",
            "TPU v6e",
            32 * _GIB,
            1.640,
            float32=918.0,
            bfloat16=918.0,
            int8=1836.0,
        ),
    )
}
